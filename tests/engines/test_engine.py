# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Engines that schedule completions themselves, so that rounds may be of any size. The tests with vLLM are in
`vllm_cpu`.
"""

import pytest
from helpers import ScriptedTrainer, letters, number, prompts, spy_on_training, tiny_config, weights

from trl_dapo import DAPOTrainer
from trl_dapo.settings.sampling_defaults import PAPER


def test_continuous_batching_samples_rounds_beyond_the_generation_batch(tiny_model, tmp_path):
    settings = {"num_blocks": 64, "max_batch_tokens": 64}
    args = tiny_config(
        tmp_path,
        use_transformers_continuous_batching=True,
        transformers_continuous_batching_config=settings,
        batch_multiplier=2.0,  # 8 prompts per round, although the generation batch holds 4
        **PAPER,
        shuffle_dataset=False,
    )
    trainer = DAPOTrainer(tiny_model, letters, args, train_dataset=prompts(40))
    sampled, generate_batch, seen = [], trainer.model.generate_batch, spy_on_training(trainer)

    def spy(prompt_ids, **kwargs):
        outputs = generate_batch(prompt_ids, **kwargs)
        rows = [(output.prompt_ids, output.generated_tokens) for output in outputs.values()]
        sampled.append([trainer.processing_class.batch_decode(row, skip_special_tokens=True) for row in rows])
        return outputs

    trainer.model.generate_batch = spy
    before = weights(trainer).clone()
    trainer.train()
    assert [len(round_) for round_ in sampled] == [32, 32]
    # From prompts 0 to 7, and then from 8 to 15, the first four that are not multiples of 3; 4 completions each.
    for round_, trained, chosen in zip(sampled, (seen[:16], seen[16:]), ([1, 2, 4, 5], [8, 10, 11, 13]), strict=True):
        assert sorted(number(prompt) for prompt, *_ in trained) == [i for i in chosen for _ in range(4)]
        # Every completion trains with the prompt for which it was sampled.
        assert all([prompt, completion] in round_ for prompt, completion, *_ in trained)
    assert (weights(trainer) - before).abs().max() > 1e-4


def test_continuous_batching_is_refused_where_it_would_round_the_weights_that_train(tiny_model, tmp_path):
    data = {"train_dataset": prompts(40)}
    settings = {"use_transformers_continuous_batching": True, "bf16": True}
    with pytest.raises(ValueError, match=r"`bf16=True` rounds the trained float32 weights to bfloat16"):
        DAPOTrainer(tiny_model, letters, tiny_config(tmp_path, **settings), **data)
    # Weights in bfloat16 do not change.
    in_bfloat16 = {"model_init_kwargs": {"dtype": "bfloat16"}}
    DAPOTrainer(tiny_model, letters, tiny_config(tmp_path, **settings, **in_bfloat16), **data)


ADDRESS = "http://planted:pa55word@gpu-7:8000"


LOST, NO_FILE = ConnectionError(f"connection refused by {ADDRESS}"), FileNotFoundError("no such picture")


def lose(tiny_model, folder, error=LOST, use_vllm=True):
    """
    Trains with a server, as far as errors are concerned. TRL requires vLLM to be installed to create such a trainer.
    """

    def script(text, i):
        raise error

    trainer = ScriptedTrainer(tiny_model, letters, tiny_config(folder), train_dataset=prompts(40), script=script)
    trainer.use_vllm, trainer.args.vllm_mode, trainer.args.vllm_server_base_url = use_vllm, "server", ADDRESS
    trainer.train()


def test_a_lost_server_is_named_with_the_last_complete_checkpoint_or_the_folder_that_holds_none(tiny_model, tmp_path):
    with pytest.raises(RuntimeError, match=r" http://gpu-7:8000 .* start over, since .* has no complete checkpoint"):
        lose(tiny_model, tmp_path)
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    (tmp_path / "checkpoint-11").mkdir()  # it was being written when the earlier run was killed
    message = r" http://gpu-7:8000 .*refused by http://gpu-7:8000.* resume from .*checkpoint-10\.$"
    with pytest.raises(RuntimeError, match=message):
        lose(tiny_model, tmp_path)


@pytest.mark.parametrize(
    ("error", "use_vllm"), [(NO_FILE, True), (LOST, False)], ids=["not the server's", "without a server"]
)
def test_another_error_of_generation_stays_what_it_is(tiny_model, tmp_path, error, use_vllm):
    said = str(error)
    with pytest.raises(type(error)) as caught:
        lose(tiny_model, tmp_path, error, use_vllm)
    assert caught.value is error
    assert str(error) == said
