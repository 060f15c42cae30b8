"""ZeRO and FSDP by hand: the optimizer's step between the two halves of an all-reduce."""
