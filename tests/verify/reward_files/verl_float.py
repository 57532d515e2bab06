import re


def extract_solution(solution_str):
    found = re.findall(r"#### (\-?[0-9\.\,]+)", solution_str)
    return found[-1].replace(",", "") if found else None


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source != "openai/gsm8k":
        raise NotImplementedError(f"Reward function is not implemented for {data_source=}")
    answer = extract_solution(solution_str)
    if answer is None:
        return 0
    return 1.0 if answer == ground_truth else 0.1
