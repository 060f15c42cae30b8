"""BERT on sentence pairs: with DataParallel, with the loss in forward, and with
DistributedDataParallel.

    lesson    the three ways, with a small encoder
    multinli  the training of the tutorials, with MultiNLI
"""
