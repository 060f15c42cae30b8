def gradient_factor(dp: int, cp: int, tp: int) -> dict[str, float]:
    """Predict the gradient of each recipe, divided by the right one."""
    # write this
    return {
        "own_mean_summed": dp * cp,
        "all_tokens_summed": 1,
        "all_tokens_averaged": 1 / (dp * cp),
        "all_tokens_summed_over_world": tp,
        "own_mean_averaged_over_world": 1,
    }
    # until here
