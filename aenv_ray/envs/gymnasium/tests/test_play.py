"""Games by tool calls: the same as with the package, whose trajectories are compared."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("gymnasium", reason="pip install -r requirements.txt")

import gymnasium
import numpy
import play
from games import Game, GameSpec
from gymnasium import spaces
from spaces import ActionInvalid, action_of, plain

from aenv_ray.runtime import Image


@pytest.fixture(autouse=True)
def no_game() -> Iterator[None]:
    yield
    play.start_game(None, None)


def direct(name: str, seed: int, actions: list[Any], **options: Any) -> list[Any]:
    """Return what the package itself returns."""
    made = gymnasium.make(name, **options)
    found = [plain(made.reset(seed=seed)[0])]
    for action in actions:
        given = numpy.asarray(action, made.action_space.dtype)[()]  # a number, or an array
        observation, reward, terminated, truncated, info = made.step(given)
        found.append([plain(observation), float(reward), terminated, truncated, plain(info)])
    made.close()
    return found


@pytest.mark.parametrize(
    "name", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "Taxi-v4", "Blackjack-v1"]
)
def test_a_seed_gives_the_trajectory_that_the_package_gives(name: str) -> None:
    made = gymnasium.make(name)
    made.action_space.seed(1)
    actions = [plain(made.action_space.sample()) for _ in range(20)]
    made.close()
    play.start_game({"env": name}, 7)
    found = [play.get_observation()["observation"]]
    taken = []
    for action in actions:
        shown = play.step(action)
        taken.append(action)
        names = ("observation", "reward", "terminated", "truncated", "info")
        found.append([shown[name] for name in names])
        if shown["terminated"] or shown["truncated"]:
            break
    assert found == direct(name, 7, taken)
    assert play.episode_return()["score"] == pytest.approx(sum(row[1] for row in found[1:]))


def test_a_vector_counts_the_first_episode_of_each_environment() -> None:
    play.start_game({"env": "CartPole-v1", "num_envs": 3}, 5)
    vector = gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync")
    observation, _ = vector.reset(seed=5)
    assert play.get_observation()["observation"] == plain(observation)
    first, is_over = [0.0] * 3, [False] * 3
    while not all(is_over):
        shown = play.step([1, 1, 0])
        observation, rewards, terminated, _, _ = vector.step(numpy.array([1, 1, 0]))
        assert shown["observation"] == plain(observation)
        for index in range(3):
            first[index] += 0.0 if is_over[index] else float(rewards[index])
            is_over[index] |= bool(terminated[index])
    vector.close()
    assert play.episode_return()["returns"] == first
    with pytest.raises(RuntimeError, match="has ended"):
        play.step([0, 0, 0])
    play.start_game({"env": "CartPole-v1", "num_envs": 3}, 5)
    with pytest.raises(ActionInvalid):
        play.step([1, 1])


def test_every_default_task_is_won_by_its_reference_and_not_by_nothing() -> None:
    tasks = json.loads(json.dumps(list(play.tasks())))
    assert len({task["id"] for task in tasks}) == len(tasks) == 45
    for task in tasks:
        play.start_game(task, task["seed"])
        arguments = task["reward"]["arguments"]
        assert play.episode_return(**arguments)["score"] == 0.0
        for call in task["reference"]:
            play.step(**call["arguments"])
        assert play.episode_return(**arguments)["score"] == 1.0, task["id"]


@pytest.mark.parametrize(
    ("space", "good", "bad"),
    [
        (spaces.Discrete(3, start=-1), [-1, 1], [2, 1.0, True, "1", None, [1], 10**30]),
        (spaces.Box(-1, 1, (2,)), [[0, 0.5]], [[0], [2, 0], 0, [float("nan"), 0], ["a", "b"], {}]),
        (spaces.MultiDiscrete([2, 3]), [[1, 2]], [[2, 0], [0.5, 0], [1]]),
        (spaces.MultiBinary(2), [[0, 1]], [[2, 0], [True, False]]),
        (spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3)]), [[1, 2]], [[1], {"a": 1}]),
        (spaces.Dict(a=spaces.Discrete(2)), [{"a": 1}], [{}, {"a": 1, "b": 1}, [1]]),
        (spaces.MultiBinary(3), [[1, 0, 1]], [[257, 0, 1], [-1, 0, 1], [1, 0, 1.0]]),
        (spaces.Box(0, 255, (1,), numpy.uint8), [[255]], [[-1], [300], [1.5], ["1"]]),
        (spaces.Box(-9, 9, (1,), numpy.int64), [[-9]], [[2.9], [10], [2**63], [True]]),
        (spaces.Box(-numpy.inf, numpy.inf, (1,)), [[2.5]], [[1e300], ["2.5"], [True], [None]]),
        (spaces.Sequence(spaces.Discrete(2)), [[], [0, 1]], [[0.7, 1], [2], 0, {}]),
        (spaces.Sequence(spaces.Box(0, 1, (1,)), stack=True), [[[0.5], [1]]], [[[2]], [0.5]]),
        (spaces.Text(3, charset="ab"), ["ab"], ["abc", "abab", "", 1, ["a"]]),
        (
            spaces.OneOf([spaces.Discrete(2), spaces.Text(3)]),
            [[0, 1], [1, "a"]],
            [[0, 2], [2, 0], [-1, 1], [0], 0, [0.0, 1]],
        ),
    ],
)
def test_actions_are_checked(space: Any, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert plain(action_of(space, value)) == value
    for value in bad:
        with pytest.raises(ActionInvalid, match="give"):
            action_of(space, value)


def test_a_graph_has_nodes_edges_and_links() -> None:
    space = spaces.Graph(node_space=spaces.Discrete(3), edge_space=spaces.Box(0, 1, (1,)))
    value = {"nodes": [0, 2], "edges": [[0.5]], "edge_links": [[0, 1]]}
    graph = action_of(space, value)
    assert plain(list(graph)) == list(value.values())
    assert plain(list(action_of(space, {"nodes": [1]}))) == [[1], None, None]
    for bad in (
        [],
        {},
        {"nodes": [3]},
        {**value, "edges": [[2]]},
        {**value, "edge_links": [[0.5, 1]]},
    ):
        with pytest.raises(ActionInvalid, match="an object: nodes"):
            action_of(space, bad)


class Chooses(gymnasium.Env):
    """Rewards the action that its space of several parts has in mind."""

    observation_space = spaces.Discrete(1)

    def __init__(self, action_space: Any, wanted: Any) -> None:
        self.action_space = action_space
        self.wanted = wanted

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return 0, {}

    def step(self, action: Any) -> Any:
        return 0, float(plain(action) == self.wanted), False, False, {}


@pytest.mark.parametrize(
    ("space", "wanted", "other"),
    [
        (spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3)]), [1, 2], [0, 2]),
        (
            spaces.Dict(a=spaces.Discrete(2), b=spaces.Box(0, 1, (1,))),
            {"a": 1, "b": [0.5]},
            {"a": 0, "b": [0.5]},
        ),
        (spaces.Discrete(2), 1, 0),
    ],
)
def test_a_vector_takes_a_list_with_an_action_for_each_environment(
    space: Any, wanted: Any, other: Any
) -> None:
    gymnasium.register("Chooses-v0", entry_point=Chooses)
    try:
        arguments = {"action_space": space, "wanted": wanted}
        spec = GameSpec(env="Chooses-v0", kwargs=arguments, num_envs=2, seed=1)
        game = Game(spec)
        assert game.step([wanted, other]) == [1.0, 0.0]
        assert game.step([other, wanted]) == [0.0, 1.0]
        assert game.describe()["action"].startswith("give a list of 2 actions, for each: give")
        for bad in ([wanted], [wanted, None], {"a": [0, 1]}, wanted):
            with pytest.raises(ActionInvalid, match="give"):
                game.step(bad)
        game.close()
    finally:
        del gymnasium.registry["Chooses-v0"]


class Pictures(gymnasium.Env):
    """Observes an image, a text, and a grid of symbols."""

    observation_space = spaces.Dict(
        screen=spaces.Box(0, 255, (16, 24, 3), numpy.uint8),
        grey=spaces.Box(0, 255, (20, 30), numpy.uint8),
        grid=spaces.Box(0, 255, (2, 2, 3), numpy.uint8),
        text=spaces.Text(9),
    )
    action_space = spaces.Discrete(1)
    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 1}  # noqa: RUF012  # as Gymnasium has it

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        parts = {name: numpy.full(space.shape, 9, numpy.uint8) for name, space in BOXES}
        return {**parts, "text": "begin"}, {}

    def render(self) -> Any:
        return numpy.zeros((3, 5, 3), numpy.uint8)

    def step(self, action: Any) -> Any:
        return self.reset()[0], 1.0, False, False, {"action_mask": numpy.array([1], numpy.int8)}


BOXES = [(n, s) for n, s in Pictures.observation_space.items() if isinstance(s, spaces.Box)]
GRID = [[[9] * 3] * 2] * 2


def size(image: Image) -> tuple[int, int]:
    width, height = struct.unpack(">II", image.data[16:24])
    return width, height


@pytest.fixture
def pictures() -> Iterator[str]:
    gymnasium.register("Pictures-v0", Pictures, max_episode_steps=3)
    yield "Pictures-v0"
    del gymnasium.registry["Pictures-v0"]


def test_images_in_observations_follow_as_images(pictures: str) -> None:
    play.start_game({"env": pictures}, 1)
    shown, *images = play.step(0)
    assert shown["observation"] == {
        "screen": "[image 1, 24 x 16]", "grey": "[image 2, 30 x 20]", "grid": GRID, "text": "begin",
    }  # fmt: skip
    assert shown["info"] == {"action_mask": [1]}
    assert [size(image) for image in images] == [(24, 16), (30, 20)]


def test_a_vector_observes_an_image_for_each_environment(pictures: str) -> None:
    play.start_game({"env": pictures, "num_envs": 2}, 1)
    shown, *images = play.step([0, 0])
    assert shown["observation"] == {
        "screen": ["[image 1, 24 x 16]", "[image 2, 24 x 16]"],
        "grey": ["[image 3, 30 x 20]", "[image 4, 30 x 20]"],
        "grid": [GRID, GRID],
        "text": ["begin", "begin"],
    }
    assert [size(image) for image in images] == [(24, 16)] * 2 + [(30, 20)] * 2


def test_stacked_frames_are_images() -> None:
    images: list[Any] = []
    assert plain(numpy.zeros((2, 16, 20, 3), numpy.uint8), images) == [
        "[image 1, 20 x 16]", "[image 2, 20 x 16]",
    ]  # fmt: skip
    assert [image.shape for image in images] == [(16, 20, 3)] * 2


def test_games_are_drawn_as_images_or_text(pictures: str) -> None:
    play.start_game({"env": "FrozenLake-v1"}, 1)
    assert play.render().data.startswith(b"\x89PNG")
    play.start_game({"env": "FrozenLake-v1", "render_mode": "ansi"}, 1)
    assert "FFF" in play.render()
    play.start_game({"env": "FrozenLake-v1", "num_envs": 2, "render_mode": "ansi"}, 1)
    assert all("FFF" in drawn for drawn in play.render())
    play.start_game({"env": pictures}, 1)
    assert size(play.render()) == (5, 3), "what is drawn is an image, however small"
    play.start_game({"env": pictures, "num_envs": 2, "render_mode": "rgb_array"}, 1)
    assert [size(drawn) for drawn in play.render()] == [(5, 3)] * 2
    play.start_game({"env": "CartPole-v1", "num_envs": 2}, 1)
    with pytest.raises(RuntimeError, match="cannot be drawn here"):
        play.render()


def test_the_import_starts_no_thread() -> None:
    assert threading.active_count() == 1
