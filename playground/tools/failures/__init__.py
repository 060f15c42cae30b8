"""Programs of torch.distributed that go wrong, each beside its cure. Begin with `calls`, then
`programs`.

    calls      calls that do not match
    training   data, random numbers, parameters and gradients that are wrong
    silent     training whose mistakes only `--check` tells
    processes  processes that die, are stopped, or lag behind
    programs   what is expected of each program
    page       the command `break`
"""
