# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Scores of evaluations during training: every problem counts once, and nothing is left of another evaluation."""

import PIL.Image
import pytest
from datasets import Dataset
from evaluations import asked
from helpers import ScriptedTrainer, number, prompts, tiny_config
from transformers import TrainerCallback

from trl_dapo.evaluation import EvaluationScores, evaluate
from trl_dapo.sampling.example_names import content_digest, problem_id


def is_seven(completions, **kwargs):
    return [1.0 if completion.endswith("7") else -1.0 for completion in completions]


class Answers:
    """Script that deals each prompt's completions from a string of their answers, a digit each, over and over."""

    def __init__(self, **digits):
        self.digits = {int(name.removeprefix("prompt_")): answers for name, answers in digits.items()}
        self.num_dealt = dict.fromkeys(self.digits, 0)

    def __call__(self, text, i):
        digits, dealt = self.digits[number(text)], self.num_dealt[number(text)]
        self.num_dealt[number(text)] += 1
        return f"Answer: {digits[dealt % len(digits)]}"


def make(model, folder, script, reward_funcs=is_seven, **overrides):
    args = tiny_config(
        folder, **{"per_device_eval_batch_size": 4, "shuffle_dataset": False, "max_completion_length": 12, **overrides}
    )
    return ScriptedTrainer(model, reward_funcs, args, script=script, train_dataset=prompts(24, solution=["7"] * 24))


def scores_of(metrics, prefix="eval"):
    """The scores alone, without their prefix."""
    return {
        name.removeprefix(f"{prefix}_"): value
        for name, value in metrics.items()
        if "@" in name and name.startswith(f"{prefix}_")
    }


def test_a_missing_id_does_not_count_as_an_id():
    assert problem_id({"id": "a", "prompt": "1+1"}) == "a"
    assert problem_id({"id": 0, "prompt": "1+1"}) == "0"
    by_prompt = problem_id({"prompt": "1+1"})
    assert by_prompt == problem_id({"id": None, "prompt": "1+1"}) == problem_id({"id": "", "prompt": "1+1"})
    assert by_prompt == problem_id({"id": float("nan"), "prompt": "1+1"})
    assert by_prompt != problem_id({"prompt": "1+2"})


@pytest.mark.parametrize(
    "sources",
    [[["a", "b"]] * 3, [{"name": "a"}] * 3, [""] * 3, [f"The {i}. document: " + "x" * 64 for i in range(3)]],
    ids=["lists", "structs", "empty", "documents"],
)
def test_a_source_that_is_not_text_is_ignored(tiny_model, tmp_path, sources):
    trainer = make(tiny_model, tmp_path, Answers(prompt_0="7", prompt_1="3", prompt_2="73"))
    assert scores_of(trainer.evaluate(prompts(3, source=sources))) == {"avg@4": 0.5, "pass@4": 2 / 3, "maj@4": 0.5}


def test_prompts_that_share_an_id_are_problems_of_their_own_and_repeats_are_one(tiny_model, tmp_path):
    trainer = make(tiny_model, tmp_path, Answers(prompt_0="7", prompt_1="3", prompt_2="73"))
    assert scores_of(trainer.evaluate(prompts(3, id=["sums"] * 3))) == {"avg@4": 0.5, "pass@4": 2 / 3, "maj@4": 0.5}
    twice = prompts(3, id=["sums"] * 3).select([0, 1, 2, 0])
    assert scores_of(trainer.evaluate(twice)) == {"avg@4": 0.5, "pass@4": 2 / 3, "maj@4": 0.5}


def test_one_prompt_with_two_golds_is_two_problems_and_the_same_row_twice_is_one(tiny_model, tmp_path):
    def is_gold(completions, solution, **kwargs):
        return [float(text.endswith(gold)) for text, gold in zip(completions, solution, strict=True)]

    trainer = make(tiny_model, tmp_path, Answers(prompt_0="7777"), is_gold)
    rows = Dataset.from_dict({"prompt": ["prompt 0:"] * 3, "solution": ["7", "3", "3"]})
    # One problem is always solved, the other never.
    assert scores_of(trainer.evaluate(rows)) == {"avg@4": 0.5, "pass@4": 0.5, "maj@4": 0.5}


def test_equal_rows_are_one_problem_also_with_an_image_and_other_images_make_others():
    row = {"prompt": "What is this?", "id": "cats"}
    red, again, blue = (
        content_digest(row | {"image": PIL.Image.new("RGB", (2, 2), c)}) for c in ("red", "red", "blue")
    )
    assert red == again != blue


def test_no_problem_is_left_out_by_a_setting_that_is_for_training(tiny_model, tmp_path):
    answers = Answers(prompt_0="7", prompt_1="3", prompt_2="3")
    sizes = {"per_device_eval_batch_size": 8, "dataloader_drop_last": True}  # two problems a batch
    trainer = make(tiny_model, tmp_path, answers, **sizes)
    assert scores_of(trainer.evaluate(prompts(3)))["avg@4"] == pytest.approx(1 / 3)
    assert scores_of(trainer.predict(prompts(3)).metrics, "test")["avg@4"] == pytest.approx(1 / 3)


def test_maj_at_k_votes_on_the_answers_of_the_reward_function(tiny_model, tmp_path):
    def last_letter(completions, log_extra, **kwargs):
        log_extra("has_answer", [True] * len(completions))
        log_extra("last_letter_answer", [int(text[-1]) for text in completions])
        return [float(text.endswith("7")) for text in completions]

    trainer = make(tiny_model, tmp_path, lambda text, i: ["7", "17", "3", "4"][i % 4], last_letter)
    assert scores_of(trainer.evaluate(prompts(1))) == {"avg@4": 0.5, "pass@4": 1.0, "maj@4": 1.0}


def test_prompts_with_an_image_and_no_id_are_not_taken_for_one_another():
    assert problem_id({"prompt": "What is this?", "image": object()}) is None
    assert problem_id({"prompt": "What is this?", "images": [object()]}) is None
    assert problem_id({"prompt": [{"role": "user", "content": [{"type": "image", "image": object()}]}]}) is None
    assert problem_id({"puzzle": 3}) is None  # an environment's
    assert problem_id({"id": "cat", "prompt": "What is this?", "image": object()}) == "cat"
    assert problem_id({"prompt": "1+1", "image": None}) == problem_id({"prompt": "1+1"})


def add(scores, problem, answers, right="7"):
    scores.add([problem] * len(answers), list(answers), [answer == right for answer in answers])


def test_scores_by_hand():
    scores = EvaluationScores(k=2)
    scores.begin(3)
    add(scores, ("easy", "1"), "77")
    add(scores, ("hard", "1"), "73")
    add(scores, ("hard", "2"), "33")
    assert scores.means() == pytest.approx(
        {
            "avg@2": (1 + 1 / 2 + 0) / 3,
            "pass@2": 2 / 3,
            "maj@2": (1 + 1 / 2 + 0) / 3,  # one vote each: half a verdict
            **{"avg@2/easy": 1, "pass@2/easy": 1, "maj@2/easy": 1},
            **{"avg@2/hard": 1 / 4, "pass@2/hard": 1 / 2, "maj@2/hard": 1 / 4},
        }
    )


def test_repeats_of_a_problem_are_pooled_and_problems_without_an_id_or_a_prompt_to_go_by_are_each_their_own():
    scores = EvaluationScores(k=2)
    scores.begin(3)
    for problem, answers in ((("a", "1"), "73"), (("a", "2"), "77"), (("a", "1"), "33")):
        add(scores, problem, answers)
    # One of the four completions of problem 1 is correct. Three of their six pairs contain it.
    assert scores.means()["avg@2"] == (1 / 4 + 1) / 2
    assert scores.means()["pass@2"] == pytest.approx((3 / 6 + 1) / 2)
    assert scores.means()["maj@2"] == (0 + 1) / 2
    scores.begin(3)
    for answers in ("77", "33", "33"):
        add(scores, ("images", None), answers)
    assert scores.means()["pass@2"] == pytest.approx(1 / 3)


def test_lists_that_fill_the_last_batch_are_dropped_by_their_number():
    scores = EvaluationScores(k=2)
    scores.begin(2)
    # The second row is a repeat of the first; the third only fills the batch, with other completions.
    for answers in ("77", "33", "77"):
        add(scores, (None, "1"), answers)
    assert scores.means()["avg@2"] == 1 / 2


def test_a_problem_that_cannot_be_scored_rows_of_two_and_an_earlier_evaluation_are_left_out():
    scores = EvaluationScores(k=2)
    scores.begin(3)
    scores.add([(None, "1")] * 2, ["7", "3"], [True, None])
    scores.add([(None, "1"), (None, "2")], ["7", "7"], [True, True])
    assert scores.means() == {}
    scores.add([(None, "2")] * 2, ["7", "3"], [True, False])
    assert scores.means()["avg@2"] == 1 / 2
    scores.begin(3)
    assert scores.means() == {}


def test_the_score_of_all_is_over_problems_with_and_without_a_source():
    scores = EvaluationScores(k=1)
    scores.begin(2)
    add(scores, (None, "1"), "7")
    add(scores, ("hard", "2"), "3")
    assert (scores.means()["avg@1"], scores.means()["avg@1/hard"]) == (1 / 2, 0)


def test_half_a_list_is_refused():
    scores = EvaluationScores(k=4)
    scores.begin(1)
    with pytest.raises(ValueError, match=r"must have 4 completions .* got 2 completions, 2 answers and 2 verdicts"):
        add(scores, (None, "1"), "73")


def test_predictions_have_scores_of_their_own_and_they_and_what_is_aborted_leave_nothing(tiny_model, tmp_path):
    trainer = make(tiny_model, tmp_path, Answers(prompt_0="3", prompt_1="7"))
    predicted = trainer.predict(prompts(1)).metrics
    assert predicted["test_avg@4"] == 0.0
    metrics = trainer.evaluate(prompts(2).select([1]))
    assert metrics["eval_avg@4"] == 1.0
    assert metrics["eval_reward"] == 1.0  # TRL's own metrics neither
    assert "eval_avg@4" not in predicted
    assert not scores_of(metrics, "test")
    abort = Abort()
    trainer.add_callback(abort)
    with pytest.raises(KeyboardInterrupt):
        trainer.evaluate(prompts(1))
    trainer.remove_callback(abort)
    assert trainer.evaluate(prompts(2).select([1])).items() >= {"eval_avg@4": 1.0, "eval_reward": 1.0}.items()


def test_without_correctness_there_are_no_scores(tiny_model, tmp_path):
    metrics = make(tiny_model, tmp_path, Answers(prompt_0="7733"), [is_seven, is_formatted]).evaluate(prompts(1))
    assert scores_of(metrics) == {}
    assert metrics["eval_rewards/is_seven/mean"] == 0.0


class Abort(TrainerCallback):
    def on_prediction_step(self, args, state, control, **kwargs):
        raise KeyboardInterrupt


def test_each_of_several_datasets_has_scores_of_its_own_name(tiny_model, tmp_path):
    trainer = make(tiny_model, tmp_path, Answers(prompt_0="7733", prompt_1="3337"))
    metrics = trainer.evaluate({"aime": prompts(1), "amc": prompts(2, source=["x", "y"])})
    assert scores_of(metrics, "eval_aime") == {"avg@4": 1 / 2, "pass@4": 1.0, "maj@4": 1 / 2}
    assert scores_of(metrics, "eval_amc")["avg@4"] == (1 / 2 + 1 / 4) / 2
    assert scores_of(metrics, "eval_amc")["avg@4/y"] == 1 / 4
    assert "eval_avg@4" not in metrics
    first, second = trainer.state.log_history[-2:]
    assert (first["eval_aime_avg@4"], second["eval_amc_avg@4"]) == (1 / 2, 3 / 8)
    assert "eval_aime_avg@4" not in second


def dapo_math(completions, solution, **kwargs):
    return [float(text.endswith(f"Answer: {gold}")) for text, gold in zip(completions, solution, strict=True)]


def is_formatted(completions, **kwargs):
    return [1.0 if completion.startswith("Answer: ") else 0.0 for completion in completions]


REWARDS = {
    "one": (dapo_math, {}),
    "two": ([is_formatted, dapo_math], {"dynamic_sampling_rewards": ["dapo_math"]}),
    "scaled": (dapo_math, {"reward_scaling": [0.0, 1.0, 0.0, 10.0], "dynamic_sampling_accuracy_threshold": 5.0}),
}
ALIKE = {
    "plain": {},
    "equal ids in two sources": {"id": ["1", "1", "2", "3"], "source": ["a", "b", "b", "a"]},
    "no ids": {"id": [None, None, "x", None]},
    "repeats": {"id": ["1", "2", "3", "1"], "repeats": True},
    "repeats without ids": {"repeats": True},
}


@pytest.mark.parametrize("rewards", REWARDS)
@pytest.mark.parametrize("data", ALIKE)
def test_evaluation_in_training_and_on_the_command_line_give_the_same_scores(
    tiny_model, tmp_path, serve, data, rewards
):
    columns = dict(ALIKE[data])
    listed = [0, 1, 2, 0] if columns.pop("repeats", False) else [0, 1, 2, 3]
    dataset = Dataset.from_dict(
        {"prompt": [f"prompt {i}:" for i in listed], "solution": [str(i) for i in listed], **columns}
    )
    answers = Answers(prompt_0="00120001", prompt_1="1123", prompt_2="0002", prompt_3="4444")
    functions, settings = REWARDS[rewards]
    in_training = make(tiny_model, tmp_path / "run", answers, functions, **settings).evaluate(dataset)
    again = Answers(prompt_0="00120001", prompt_1="1123", prompt_2="0002", prompt_3="4444")
    server = serve(lambda body: again(*asked(body)))
    summary = evaluate("tiny", dataset, tmp_path / "eval", base_url=server.url, k=4, concurrency=1, progress=False)
    on_the_line = {name: estimate["mean"] for name, estimate in summary["metrics"].items() if name != "pass@2"}
    for source, figures in summary["sources"].items() if "source" in columns else ():
        of_source = {f"{name}/{source}": figure["mean"] for name, figure in figures["metrics"].items()}
        on_the_line |= {name: mean for name, mean in of_source.items() if not name.startswith("pass@2")}
    assert scores_of(in_training) == pytest.approx(on_the_line)
    assert 0 < in_training["eval_avg@4"] < 1
