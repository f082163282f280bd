"""Two agents negotiate in an environment, and each gets a reward of its own.

    python examples/negotiation.py

The agents are environments too: `agent_env` wraps the functions below. An episode has an instance
of the market, which is the referee, and one of each agent. The four episodes of a task are a group,
as GRPO compares them: they get their markets together or not at all.
"""

import re
import tempfile
from pathlib import Path

import aenv_ray
from aenv_ray import Environment

LIMITS = {"seller": 40, "buyer": 90}
MARKET = """
from typing import Literal

from aenv_ray.runtime import register_reward, register_tool

LIMITS = {"seller": 40, "buyer": 90}
offers = {}


@register_tool
def offer(side: Literal["seller", "buyer"], price: int) -> str:
    '''Offer a price; the sides agree once the buyer offers at least what the seller asks.'''
    offers[side] = price
    return f"agreed at {agreed()}" if agreed() else f"the {side} offers {price}"


def agreed() -> int:
    asked, given = offers.get("seller"), offers.get("buyer")
    return given if asked and given and given >= asked else 0


@register_reward
def gains() -> dict[str, float]:
    price, room = agreed(), LIMITS["buyer"] - LIMITS["seller"]
    seller = (price - LIMITS["seller"]) / room if price else 0.0
    buyer = (LIMITS["buyer"] - price) / room if price else 0.0
    return {"score": seller + buyer, "seller": seller, "buyer": buyer}
"""


def seller(messages: list[dict[str, str]]) -> str:
    """Ask for less each time: a stand-in for a model."""
    return f"I ask {max(100 - 15 * len(messages), LIMITS['seller'])}"


def buyer(messages: list[dict[str, str]]) -> str:
    """Offer more each time: a stand-in for a model."""
    return f"I offer {min(25 + 10 * len(messages), LIMITS['buyer'])}"


def a_market(root: Path) -> Path:
    (root / "src").mkdir(parents=True)
    (root / "config.json").write_text('{"name": "market", "deployConfig": {"network": "none"}}')
    (root / "src" / "market.py").write_text(MARKET)
    return root


class Negotiation:
    """The policy of an episode: the agents speak in turns until they agree."""

    def __init__(self, agents: dict[str, Path]) -> None:
        self.agents = agents

    async def __call__(self, market, task) -> str:
        async with (
            Environment(str(self.agents["seller"]), actor="shared") as seller,
            Environment(str(self.agents["buyer"]), actor="shared") as buyer,
        ):
            heard = task.instruction
            for _ in range(10):
                for side, agent in (("seller", seller), ("buyer", buyer)):
                    said = await agent.call_tool("chat", {"message": heard})
                    if said.is_error:  # its text is no offer
                        raise RuntimeError(f"the {side} failed: {said.text()}")
                    price = re.search(r"\d+", said.text())
                    if price is None:  # as a model may answer
                        heard = f"the {side} names no price, but says: {said.text()}"
                        continue
                    seen = await market.call_tool("offer", {"side": side, "price": int(price[0])})
                    heard = seen.text()
                    if heard.startswith("agreed"):
                        return heard
        return "no agreement"


def main() -> None:
    agents = {
        "seller": aenv_ray.agent_env(seller, name="seller", network="none"),
        "buyer": aenv_ray.agent_env(buyer, name="buyer", network="none"),
    }
    tasks = [{"id": "bicycle", "instruction": "Negotiate the price of a bicycle."}]
    with tempfile.TemporaryDirectory() as directory:
        market = a_market(Path(directory) / "market")
        sampling = aenv_ray.sample(
            str(market), Negotiation(agents), tasks, samples_per_task=4, concurrency=4
        )
        for episode in sampling:
            gains = episode.reward_detail
            if gains is None:  # the infrastructure failed, or an agent did
                print(f"{episode.status.value}: {episode.error}")
                continue
            print(f"{episode.output}: seller {gains['seller']:.1f}, buyer {gains['buyer']:.1f}")
    print("left", len(aenv_ray.list_instances()))
    aenv_ray.shutdown()


if __name__ == "__main__":
    main()
