"""The lesson on expert parallelism: a mixture of experts, a part of them on each rank."""
