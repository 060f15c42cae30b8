"""All-reduce, written by ourselves: every algorithm in place of `dist.all_reduce(tensor, op, group)`.

| name | a rank sends | in steps | good for |
|---|---|---|---|
| reduce-broadcast | root (N - 1)·S, others S | 2 (N - 1) at the root | understanding what is wrong with it |
| all-to-all | (N - 1)·S | 1 | two ranks |
| tutorial-ring | (N - 1)·S | N - 1 | reading tutorials |
| ring | 2 (N - 1) / N·S | 2 (N - 1) | large tensors |
| recursive-doubling | log2 N·S | log2 N | small tensors |
| halving-doubling | 2 (N - 1) / N·S | 2 log2 N | what lies between |
| binary-tree | up to 3 S | 2 log2 N | small tensors, many ranks |
| auto | what the chosen one does | | anything |
"""

from playground.algorithms.choice import auto
from playground.algorithms.naive import all_to_all, reduce_broadcast
from playground.algorithms.operation import AllReduce
from playground.algorithms.ring import ring, tutorial_ring
from playground.algorithms.trees import binary_tree, halving_doubling, recursive_doubling

ALGORITHMS: dict[str, AllReduce] = {
    "reduce-broadcast": reduce_broadcast,
    "all-to-all": all_to_all,
    "tutorial-ring": tutorial_ring,
    "ring": ring,
    "recursive-doubling": recursive_doubling,
    "halving-doubling": halving_doubling,
    "binary-tree": binary_tree,
    "auto": auto,
}

__all__ = ["ALGORITHMS", "AllReduce"]
