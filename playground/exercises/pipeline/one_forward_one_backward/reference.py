from typing import Any


def one_forward_one_backward(
    rank: int,
    size: int,
    stage: Any,
    microbatches: int,
) -> None:
    """Let every microbatch m go forward and backward through this rank's stage,
    in the order of 1F1B.

    stage.forward(m) receives its activations, computes, sends on, and keeps
    what backward needs; stage.backward(m) receives a gradient, computes, sends
    back, and frees that. Both wait for what they receive, but not for what they
    send.
    """
    # write this
    warm_up = min(microbatches, size - 1 - rank)
    for m in range(warm_up):
        stage.forward(m)
    for m in range(warm_up, microbatches):
        stage.forward(m)
        stage.backward(m - warm_up)
    for m in range(microbatches - warm_up, microbatches):
        stage.backward(m)
    # until here
    stage.finish()
