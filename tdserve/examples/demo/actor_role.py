"""``tdserve demo --role actor``: an actor as a process of its own, which outlives server, network and learner."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from tdserve.base.errors import DeadlineExceededError
from tdserve.examples.demo.actor import WARMUP_CALLS, Actor
from tdserve.examples.demo.options import DemoOptions
from tdserve.examples.demo.patience import BORNE, Patience
from tdserve.examples.demo.stores import PATIENCE_S

GONE_S = 300.0
"""Without any success for so long, the server or the learner will not come back by itself."""


def act_alone(options: DemoOptions) -> int:
    """Acts until the learner says that the run is over, or ``max_seconds`` and a minute are over.

    Returns:
        The exit code: 0.

    Raises:
        TDServeError: The server or the learner has been gone for five minutes, or the server refuses this actor.
    """
    torch.set_num_threads(1)

    def say(line: str) -> None:
        print(f"actor {options.index}: {line}", flush=True)

    say(f"connects to {options.server_address}")
    patience = Patience(GONE_S, say=say)
    with options.connect(timeout_s=PATIENCE_S) as client:
        actor = patience.call(lambda: Actor(client, options))
        ending = _act(actor, patience, max_seconds=options.max_seconds, say=say)
        while actor.is_over and _another_begins(actor, options.linger_s, say=say):
            ending = _act(actor, patience, max_seconds=options.max_seconds, say=say)
    say(f"{ending}; {actor.num_sent:,} transitions sent, policy version {actor.version}")
    return 0


def _act(actor: Actor, patience: Patience, *, max_seconds: float, say: Callable[[str], None]) -> str:
    """Acts; returns why it has ended."""
    patience.call(actor.look)
    if actor.is_over:
        say("the run there is over; waits for another one")
        try:
            actor.follow_policy()
        except DeadlineExceededError:
            return "no other run has begun"
    for _ in range(WARMUP_CALLS):
        patience.call(lambda: actor.act(exploration=1.0))
    deadline_s = time.monotonic() + max_seconds + PATIENCE_S
    while time.monotonic() < deadline_s:
        try:
            exploration = actor.follow_policy()
            if actor.is_over:
                return "the learner says that it is over"
            actor.act(exploration)
        except BORNE as error:
            patience.bear(error)
        else:
            patience.renew()
    return "the time is up"


def _another_begins(actor: Actor, linger_s: float, *, say: Callable[[str], None]) -> bool:
    """Stays for another run; returns whether one began. False at once when nobody wants it to stay."""
    if linger_s == 0:
        return False
    say(f"the run is over; stays {linger_s:g} s for another one")
    try:
        actor.follow_policy(linger_s)
    except BORNE:
        return False  # nobody began one, or the server went away first
    return not actor.is_over
