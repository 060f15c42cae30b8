"""What a recording says: who waited for whom, what was hidden, how many bytes were sent, and what would be if.

Pure functions of a `Recording`; nothing here imports torch.
"""
