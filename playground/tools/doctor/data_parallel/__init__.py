"""What the script of a training in one process lacks for data parallelism, part by part, each with
the lines to change. The text is read, and not run. Does not import torch.

Where the text has another shape than is known here, the part is said to be unknown, with what it
has to do, and nothing is changed. Begin with `plan`.

    plan        from the text of a script to the parts that it lacks
    parts       a part, and whether it is there
    edits       changes of a text
    names       names that a text uses where nothing has bound them
    text        what the text shows: where a name leads, what a loop takes its batches from
    trainings   its loops that train, and the way to them
    script      what several parts ask of a script
    start       parts: the process group, and the device
    data        each rank's share of a batch
    epochs      another order of samples in each epoch
    batches     shares of batches that no plain DataLoader makes
    model       the wrapper
    seeds       what all ranks have to draw alike, and what each draws apart
    output      what only one rank prints and saves
    writers     objects that write a log
    progress    lines and bars of progress
    metrics     what ranks add up
    sums        what a loop adds up, or collects
    reductions  lines that bring that together
    meters      numbers that an object collects
    stops       a stop of the training by a value which each rank computes
    resume      what all ranks read
"""
