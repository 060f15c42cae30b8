def rank_work(
    ranks: int,
    batch: int,
    inputs: int,
    hidden: int,
    outputs: int,
) -> dict[str, int]:
    """Predict what a rank computes and sends in a step.

    "strong", "weak", "evaluated": floating point operations. "sent" and
    "sent_per_microbatch": bytes.
    """
    # write this
    first, second = inputs * hidden, hidden * outputs
    sample = 2 * (2 * first + 3 * second)
    sent = 2 * (ranks - 1) * 4 * (first + second) // ranks
    return {
        "strong": sample * batch // ranks,
        "weak": sample * batch,
        "evaluated": sample * batch // ranks + 2 * (first + second) * batch,
        "sent": sent,
        "sent_per_microbatch": 4 * sent,
    }
    # until here
