# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The stream of prompts over several passes, rounds and restarts."""

import json
import re

import pytest
from datasets import Dataset, Image, IterableDataset, concatenate_datasets

from trl_dapo.sampling.example_names import shown_names
from trl_dapo.sampling.prompts import PromptStream


pytestmark = pytest.mark.fast


def numbers(n, **columns):
    return Dataset.from_dict({"prompt": [f"What is {i} + {i}?" for i in range(n)], **columns})


def streamed(n, **columns):
    return numbers(n, **columns).to_iterable_dataset()


def ids(taken):
    return [prompt_id for prompt_id, _ in taken]


def texts(taken):
    return [example["prompt"] for _, example in taken]


both_kinds = pytest.mark.parametrize("kind", [numbers, streamed])


@both_kinds
def test_no_prompt_comes_twice_within_a_pass_and_none_is_lost_and_each_pass_has_its_own_order(kind):
    stream, taken = PromptStream(kind(50), seed=0), []
    while len(taken) < 150:  # rounds of uneven size, which span several passes
        taken += texts(stream.take(min(7 + len(taken) % 5, 150 - len(taken))))
    orders = [taken[start : start + 50] for start in (0, 50, 100)]
    assert [sorted(order) for order in orders] == [sorted(numbers(50)["prompt"])] * 3
    assert orders[0] != orders[1] != orders[2] != orders[0]


@both_kinds
def test_the_seed_alone_sets_the_order(kind):
    one, two, other = (PromptStream(kind(50), seed=seed) for seed in (3, 3, 1))
    taken = one.take(120)
    assert taken == two.take(40) + two.take(0) + two.take(80)
    assert taken[:50] != other.take(50)


def shown_alone(name):
    """Return what is displayed for a name whose id no other prompt has."""
    return shown_names([name])[name]


def shown(names):
    return [shown_alone(name) for name in names]


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ({"id": [10, 11, 12]}, ["10", "11", "12", "10"]),
        ({"id": [1, 1, 2], "source": ["a", "b", None]}, ["a/1", "b/1", "2", "a/1"]),
    ],
    ids=["id", "id and source"],
)
@both_kinds
def test_a_name_begins_with_the_id_beside_its_source_and_is_the_same_in_every_pass(kind, columns, named):
    names = ids(PromptStream(kind(3, **columns), seed=0, shuffle=False).take(4))
    assert shown(names) == named
    assert names[3] == names[0]


NO_IDS = {
    "two datasets numbered from 0": {"id": [*range(20)] * 2},
    "a category": {"id": ["algebra", "geometry", "sums", "sets"] * 10},
    "a category in two sources": {"id": ["algebra", "sets"] * 20, "source": ["a"] * 20 + ["b"] * 20},
    "a slash in either": {"id": ["algebra/1", "1"] * 20, "source": ["math", "math/algebra"] * 20},
}


@pytest.mark.parametrize("columns", NO_IDS.values(), ids=NO_IDS)
@both_kinds
def test_40_prompts_are_40_whatever_stands_in_the_id(kind, columns):
    """
    For example 40 prompts with an id each: the memory and the ledger would treat two prompts with one name as one.
    """
    assert len({*ids(PromptStream(kind(40, **columns), seed=0).take(40))}) == 40
    assert len({*ids(PromptStream(kind(40, id=[*range(40)]), seed=0).take(40))}) == 40


def test_people_are_shown_the_id_alone_if_it_names_one_prompt_and_a_hash_as_it_is():
    named = ids(PromptStream(numbers(4, id=["a", "b", "b", None]), seed=0, shuffle=False).take(4))
    assert [*shown_names(named).values()] == ["a", *named[1:]]
    assert all(re.fullmatch("b #[0-9a-f]{16}", name) for name in named[1:3])
    assert re.fullmatch("[0-9a-f]{16}", named[3])


def test_another_dataset_that_is_numbered_from_0_too_has_other_names():
    """A run can continue with the memory of a run on the other dataset."""
    sums, products = numbers(20, id=[*range(20)]), numbers(40).select(range(20, 40)).add_column("id", [*range(20)])
    names = [{*ids(PromptStream(dataset, seed=0).take(20))} for dataset in (sums, products)]
    assert not names[0] & names[1]


@pytest.mark.parametrize("missing", [None, "", float("nan")])
@both_kinds
def test_a_prompt_without_an_id_is_named_by_its_content_in_every_pass(kind, missing):
    """Rows with the same name would share one record in the memory."""
    stream = PromptStream(kind(20, id=[missing] * 20), seed=0)
    first, second = (dict(zip(texts(taken), ids(taken), strict=True)) for taken in (stream.take(20), stream.take(20)))
    assert first == second
    assert len({*first.values()}) == 20
    assert len({*ids(PromptStream(kind(20), seed=0).take(20))}) == 20


@pytest.mark.parametrize("id_", [None, "algebra"])
def test_a_prompt_keeps_its_name_when_the_dataset_is_reordered_or_shrinks_or_is_streamed(id_):
    columns = {} if id_ is None else {"id": [id_] * 25}
    names = {example["prompt"]: name for name, example in PromptStream(numbers(25, **columns), seed=0).take(25)}
    others = [
        numbers(25, **columns).shuffle(seed=3),
        numbers(25, **columns).select(range(3, 20)),
        streamed(25, **columns),
    ]
    for dataset in others:
        taken = PromptStream(dataset, seed=0).take(17)
        assert [names[text] for text in texts(taken)] == ids(taken)


def test_prompts_that_differ_in_their_image_only_are_told_apart_without_opening_it():
    dataset = numbers(1).add_column("image", [None]).cast_column("image", Image())
    dataset = concatenate_datasets([dataset, dataset])
    assert len(set(ids(PromptStream(dataset, seed=0).take(2)))) == 2
    dataset.set_transform(lambda batch: pytest.fail("an image was opened"), columns=["image"])
    assert PromptStream(dataset, seed=0).order() != PromptStream(numbers(2), seed=0).order()


def with_images(num, **columns):
    return numbers(1, **columns).add_column("image", [None]).cast_column("image", Image()).select([0] * num)


def test_an_id_that_several_images_share_does_not_tell_them_apart_and_one_that_each_has_alone_does():
    shared = with_images(2, id=["cats"])
    assert len({*ids(PromptStream(shared, seed=0).take(2))}) == 2
    alone = with_images(3).add_column("id", [7, 8, 9])
    names = ids(PromptStream(alone, seed=0, shuffle=False).take(3))
    assert shown(names) == ["7", "8", "9"]
    assert ids(PromptStream(alone.select([2, 0, 1]), seed=0, shuffle=False).take(3)) == [names[2], *names[:2]]


@both_kinds
def test_examples_come_with_all_their_columns_or_those_asked_for_and_are_named_by_all(kind):
    rows = kind(2, solution=["0", "2"], id=["x", "y"])
    whole, asked = (PromptStream(rows, seed=0, shuffle=False, columns=names) for names in (None, ["prompt", "image"]))
    [(name, example)] = whole.take(1)
    assert (shown([name]), example) == (["x"], {"prompt": "What is 0 + 0?", "solution": "0", "id": "x"})
    assert asked.take(1) == [(name, {"prompt": "What is 0 + 0?"})]


def test_the_fingerprint_tells_order_and_length():
    one, same, reordered, grown = (
        PromptStream(dataset, seed=0).order()["dataset"]
        for dataset in (numbers(50), numbers(50), numbers(50).shuffle(seed=1), numbers(51))
    )
    assert one == same
    assert len({one, reordered, grown}) == 3


def begun(dataset, **settings):
    stream = PromptStream(dataset, **{"seed": 0, **settings})
    stream.begin()
    return stream


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_streamed_dataset_is_told_by_its_first_rows(shuffle):
    # fewer than are read for the fingerprint
    shuffled, shorter = numbers(50).shuffle(seed=1).to_iterable_dataset(), streamed(15)
    one, same, reordered, fewer = (
        begun(dataset, shuffle=shuffle).order()["first_rows"]
        for dataset in (streamed(50), streamed(50), shuffled, shorter)
    )
    assert one == same
    assert len({one, reordered, fewer}) == 3
    taken = PromptStream(streamed(50), seed=0, shuffle=shuffle)
    assert "first_rows" not in taken.order()  # unknown until the dataset is read
    taken.take(1)
    assert taken.order()["first_rows"] == one
    assert PromptStream(numbers(50), seed=0).order()["dataset"] != taken.order()["dataset"] is None


def counted(n, read):
    """A dataset that records what is read from it."""

    def rows():
        for i in range(n):
            read.append(i)
            yield {"prompt": str(i)}

    return IterableDataset.from_generator(rows)


def test_first_rows_are_read_once_and_no_row_behind_them():
    read = []
    stream = begun(counted(100, read), shuffle=False)
    assert read == list(range(16))
    stream.begin()
    assert texts(stream.take(40)) == [str(i) for i in range(40)]
    assert read == list(range(40))
    state, resumed = stream.state_dict(), begun(counted(100, read := []), shuffle=False)
    resumed.load_state_dict(state)
    assert texts(resumed.take(2)) == ["40", "41"]
    assert read == list(range(42))  # up to the position, and each once


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("is_begun", [False, True])
def test_a_stream_that_cannot_be_read_twice_loses_no_row(shuffle, is_begun):
    rows = iter([{"prompt": str(i)} for i in range(50)])
    stream = PromptStream(IterableDataset.from_generator(lambda: rows), seed=0, shuffle=shuffle)
    if is_begun:
        stream.begin()
    assert sorted(map(int, texts(stream.take(50)))) == list(range(50))


def test_a_pass_behind_the_first_is_read_from_its_own_start():
    straight, resumed = (PromptStream(streamed(20), seed=0) for _ in range(2))
    straight.take(45)
    resumed.begin()  # with the order of the first pass
    resumed.load_state_dict(straight.state_dict())
    assert resumed.take(15) == straight.take(15)


def test_a_row_that_json_cannot_hold_has_the_same_name_in_the_next_run():
    class Decoder:
        """A value whose text contains its address, like that of torchcodec's decoders."""

    def stream(decoder):
        return IterableDataset.from_generator(lambda: iter([{"prompt": "p", "video": decoder, "seen": b"x"}]))

    one, other = Decoder(), Decoder()
    assert str(one) != str(other)
    assert begun(stream(one)).order() == begun(stream(other)).order()


@both_kinds
@pytest.mark.parametrize("num_taken", [0, 3, 10, 13, 25, 30])
def test_a_resumed_stream_goes_on_with_the_very_next_prompt(kind, num_taken):
    straight, resumed = (PromptStream(kind(10), seed=5) for _ in range(2))
    straight.take(num_taken, skip=lambda prompt_id, may_skip: prompt_id == "3")
    resumed.take(7)  # which is forgotten
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    assert resumed.passes == straight.passes
    assert resumed.num_skipped == straight.num_skipped
    assert resumed.take(25) == straight.take(25)
    assert resumed.state_dict() == straight.state_dict()


def test_another_dataset_begins_the_pass_after_the_one_that_was_left():
    left, other, straight = PromptStream(numbers(10), seed=0), *(PromptStream(numbers(11), seed=0) for _ in range(2))
    left.take(14)  # in the second pass
    other.begin_after(left.state_dict())
    straight.take(22)
    assert other.take(5) == straight.take(5)  # the third


def test_passes_count_what_was_drawn():
    stream = PromptStream(numbers(8, id=list(range(8))), seed=0)
    assert stream.passes == 0
    stream.take(2)
    assert stream.passes == 0.25
    stream.take(10, skip=lambda name, may_skip: int(shown_alone(name)) < 4)
    assert stream.passes == pytest.approx((2 + 10 + stream.num_skipped) / 8)


def test_passes_of_a_streamed_dataset_count_whole_until_its_length_is_known():
    stream = PromptStream(streamed(8), seed=0)
    stream.take(2)
    assert stream.passes == 0
    stream.take(8)
    assert stream.passes == 1.25


@both_kinds
def test_skipped_prompts_are_passed_over_and_counted(kind):
    stream = PromptStream(kind(6, id=list("abcdef")), seed=0, shuffle=False)
    taken = stream.take(5, skip=lambda name, may_skip: shown_alone(name) in "bd")
    assert shown(ids(taken)) == ["a", "c", "e", "f", "a"]
    assert stream.num_skipped == 2
    assert shown(ids(stream.take(2))) == ["b", "c"]  # without a rule nothing is skipped


@both_kinds
def test_a_rule_that_skips_everything_does_not_hang(kind):
    asked, stream = [], PromptStream(kind(5), seed=0)
    assert len(stream.take(12, skip=lambda prompt_id, may: asked.append(prompt_id) or may)) == 12
    assert stream.num_skipped == 9  # of any 9 prompts in a row, 5 make a whole pass
    assert len(asked) == 9 + 12  # and the rule is told which were taken


def test_skipped_prompts_are_not_loaded():
    loaded, dataset = [], numbers(6, id=list("abcdef"))
    dataset = dataset.with_transform(lambda batch: loaded.extend(batch["prompt"]) or batch, columns=["prompt"])
    PromptStream(dataset, seed=0, shuffle=False).take(2, skip=lambda name, may_skip: shown_alone(name) in "abd")
    assert loaded == ["What is 2 + 2?", "What is 4 + 4?"]


@pytest.mark.parametrize("dataset", [numbers(0), IterableDataset.from_generator(lambda: iter(()))])
def test_an_empty_dataset_is_refused(dataset):
    with pytest.raises(ValueError, match="training dataset is empty"):
        PromptStream(dataset, seed=0).take(1)
