def elements_written(ranks: int, tensors: list[int]) -> dict[str, list[int]]:
    """Predict how many elements each rank writes into its file.

    "ddp": all ranks hold all tensors. "zero_3": each rank holds its part of
    each. tensors: their numbers of elements, in the order of the state.
    """
    # write this
    ddp, zero_3 = [0] * ranks, [0] * ranks
    for elements in tensors:
        ddp[ddp.index(min(ddp))] += elements
        for rank in range(ranks):
            begin = elements * rank // ranks
            zero_3[rank] += elements * (rank + 1) // ranks - begin
    return {"ddp": ddp, "zero_3": zero_3}
    # until here
