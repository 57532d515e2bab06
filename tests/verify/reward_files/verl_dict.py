def compute_score(data_source, solution_str, ground_truth, extra_info=None, overlong_from=40, **kwargs):
    """DAPO style: a score of 1 or -1, minus a penalty for long completions."""
    pred = solution_str.split("Answer:")[-1].strip() if "Answer:" in solution_str else "[INVALID]"
    correct = pred == ground_truth
    penalty = min(1.0, max(0, len(solution_str) - overlong_from) / 40)
    return {
        "score": (1.0 if correct else -1.0) - penalty,
        "acc": correct,
        "pred": pred,
        "overlong": penalty,
        "index": extra_info["index"],
    }
