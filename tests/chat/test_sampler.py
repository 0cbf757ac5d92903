"""Logits become a token as `generate` would do it, and a seed reproduces the draw."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chat.sampler import Sampler
from chat.settings import SamplingSettings
from tests.chat.passes import llama

CPU = torch.device("cpu")
VOCAB = 50
NEUTRAL: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}


def logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def sampler(seed: int = 0, context: tuple[int, ...] = (), **changes: Any) -> Sampler:
    return Sampler(SamplingSettings(**{**NEUTRAL, **changes}), seed, context, CPU)


def draws(drawer: Sampler, count: int = 200) -> list[int]:
    scores = logits()
    return [drawer.sample(scores) for _ in range(count)]


def ranked() -> list[int]:
    return logits()[0].argsort(descending=True).tolist()


def test_temperature_zero_takes_the_first_choice_whatever_the_other_settings() -> None:
    greedy = sampler(temperature=0, top_k=5, top_p=0.5, min_p=0.2)
    assert set(draws(greedy, 20)) == {ranked()[0]}


def test_a_seed_reproduces_its_draws_and_another_one_does_not() -> None:
    assert draws(sampler(seed=7)) == draws(sampler(seed=7))
    assert draws(sampler(seed=7)) != draws(sampler(seed=8))


def test_the_largest_seed_that_is_allowed_can_be_used() -> None:
    assert draws(sampler(seed=2**63 - 1), 3) == draws(sampler(seed=2**63 - 1), 3)


def test_drawing_neither_reads_nor_moves_the_random_numbers_of_the_process() -> None:
    """C45: two replies that take turns must not change each other."""
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    alone = draws(sampler(seed=7), 20)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    assert draws(sampler(seed=7), 20) == alone


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({"top_k": 1}, 1),
        ({"top_k": 3}, 3),
        ({"top_k": 1000}, VOCAB),
        ({"top_p": 1e-6}, 1),
        ({"min_p": 0.999}, 1),
        ({"temperature": 0.01}, 1),
    ],
)
def test_a_filter_leaves_the_best_choices_only(changes: dict[str, Any], allowed: int) -> None:
    assert set(draws(sampler(**changes))) <= set(ranked()[:allowed])


def test_without_filters_every_token_can_be_drawn() -> None:
    drawer, flat = sampler(), torch.zeros(1, VOCAB)
    assert {drawer.sample(flat) for _ in range(2000)} == set(range(VOCAB))


def test_the_repetition_penalty_sees_the_prompt_and_what_was_drawn() -> None:
    scores = torch.full((1, VOCAB), 1.0)
    scores[0, 3], scores[0, 4], scores[0, 5] = 3.0, 2.9, 2.8
    drawer = sampler(temperature=0, repetition_penalty=1.5, context=(3,))
    assert [drawer.sample(scores), drawer.sample(scores)] == [4, 5]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_an_output_that_is_no_number_is_an_error_and_not_token_zero(value: float, temperature: float) -> None:
    scores = logits()
    scores[0, 10] = value
    with pytest.raises(ValueError, match="number"):
        sampler(temperature=temperature).sample(scores)


@pytest.mark.parametrize(
    "changes", [{"temperature": 2}, {"repetition_penalty": 2}, {"top_p": 1}, {"min_p": 0}, {"temperature": 1}]
)
def test_whole_numbers_are_as_good_as_fractions(changes: dict[str, Any]) -> None:
    """A slider in a browser sends 2 for 2.0."""
    fractions: dict[str, Any] = {name: float(value) for name, value in changes.items()}
    assert draws(sampler(**changes), 20) == draws(sampler(**fractions), 20)


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-30])
def test_a_temperature_next_to_nothing_is_greedy_and_no_error(temperature: float) -> None:
    assert set(draws(sampler(temperature=temperature), 5)) == {ranked()[0]}


@given(
    st.fixed_dictionaries(
        {
            "temperature": st.floats(0.2, 2.0),
            "top_p": st.floats(0.3, 1.0),
            "top_k": st.integers(0, 30),
            "min_p": st.floats(0.0, 0.3),
            "repetition_penalty": st.floats(1.0, 1.5),
        }
    ),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=5)
def test_it_draws_what_generate_draws(changes: dict[str, Any], seed: int) -> None:
    """The processors and their order are transformers' own."""
    model: Any = llama().model
    prompt = tuple(range(30, 50))
    torch.manual_seed(seed)
    theirs = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=True,
        max_new_tokens=8,
        min_new_tokens=8,
        eos_token_id=None,
        pad_token_id=0,
        **{**changes, "top_k": changes["top_k"] or None},
    )[0, len(prompt) :].tolist()
    drawer = Sampler(SamplingSettings(**changes), seed, prompt, CPU)
    ours: list[int] = []
    with torch.inference_mode():
        while len(ours) < 8:
            ids = torch.tensor([[*prompt, *ours]])
            ours.append(drawer.sample(model(input_ids=ids, use_cache=False).logits[:, -1]))
    assert ours == theirs
