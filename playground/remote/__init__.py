"""Remote calls: a function runs on another rank, and its result is returned.

`agent.py` is the agent of the lesson rpc with all that programs need besides.
"""
