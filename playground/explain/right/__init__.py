"""Is it right? Silent mistakes of a program's training: it raises nothing, and its result is not
the one that was meant.

Each rank writes what it sees of its optimizers, models and calls into a log of its own, which is
there after the rank was killed. The ranks' logs are compared when the program has ended. Ranks call
nothing for this. A finding names the ranks, the step, the line, why, and what to do. What the rules
need and nobody has seen is unknown, and an unknown is never a finding.

In a rank, what is seen and written:

    observer          watches the program: it starts the watchers
    watcher           what the watchers have in common
    training_seen     models, optimizers, and calls between their steps
    models_seen       models that are wrapped, and their parameters' names
    data_seen         samples and batches
    files_seen        files that are written and read
    calls_seen        tensors of calls, until these are over
    source            what the program's source says of a call
    training_records  what is kept between two looks
    parameter_names   names of parameters, and which of them a call takes
    fingerprint       fingerprints of tensors
    log               the log

From the logs to facts:

    reading    reads the logs
    facts      what a rank's log says
    replicas   which parameters are to be equal on which ranks
    gathering  sends a log to rank 0, of ranks that others have started

Rules, and what they find:

    finding     a finding, and how sure it is
    rules       what the facts of all ranks are judged by
    every_rule  all rules
    averaging   gradients averaged by hand (M, K)
    clipping    gradients clipped before that (M8)
    calls       single calls (A, G, L0, P1)
    data        data that ranks train on (E, S)
    samples     samples of the ranks of a model (S5, S10)
    printed     sums of one rank's samples that are printed (S11)
    drift       replicas that DistributedDataParallel keeps equal (D)
    models      what a model computes (L1, E3, B1, M7)
    optimizers  parameters that optimizers have (O1, M11)
    files       files, and what was loaded (F, R)
    sharding    DTensors (X, F3)

What a person gets:

    run, launch  a run, or a function on ranks, that is checked
    checked      such a function, as it is sent to a rank
    early        findings while the ranks run
    report       findings in words
"""

CHECKS = OFF, CERTAIN, HINTS, STRICT = "off", "certain", "hints", "strict"
"""What `--check` tells: nothing; what is certain or probable; hints, too; or what is certain or
probable, with exit code 1 if something is certain."""
