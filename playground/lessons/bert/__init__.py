"""BERT on sentence pairs: with DataParallel, with the loss in forward, and with
DistributedDataParallel."""
