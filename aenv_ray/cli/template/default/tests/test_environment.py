"""Run with `aenv test`. The registered functions are ordinary ones: tests call them directly."""

from pathlib import Path

import aenv_template_module as environment
import pytest


@pytest.fixture(autouse=True)
def episode():
    environment.new_game(seed=1)


def solve():
    low, high = 1, 100
    while not (answer := environment.guess(middle := (low + high) // 2)).startswith("correct"):
        low, high = (middle + 1, high) if answer == "higher" else (low, middle - 1)


def test_halving_the_range_solves_it_with_full_reward():
    solve()
    assert environment.solved() == 1.0


def test_an_unsolved_game_has_no_reward():
    environment.guess(0)
    assert environment.solved() == 0.0


def test_more_guesses_give_less_reward():
    for _ in range(13):
        environment.guess(0)
    solve()
    assert 0 < environment.solved() < 1


def test_a_seed_names_one_game():
    environment.new_game(seed=7)
    first = environment.game.secret
    environment.new_game(seed=7)
    assert environment.game.secret == first


def test_the_project_offers_its_parts():
    from aenv_ray.runtime.api.loader import load_project

    registry = load_project(Path(__file__).parents[1])
    assert set(registry.tools) == {"guess"}
    assert set(registry.rewards) == {"solved"}
    assert set(registry.functions) == {"new_game"}
    assert environment.healthy()
