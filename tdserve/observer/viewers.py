"""Who looks: each token has a client of its own, so that the server itself decides what is shown to its holder."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from tdserve.base.errors import InvalidRequestError, TDServeError, UnauthenticatedError
from tdserve.observer.pages.row_preview import RowPreviews
from tdserve.observer.snapshots import Snapshots

CHECK_AGAIN_S = 1.0
"""Age up to which a token counts as valid without a question: one that is revoked shows nothing a second later."""

MAX_VIEWERS = 64
"""Tokens that have a client; the one that was used longest ago loses it."""


@dataclass
class Viewer:
    """What a caller is shown.

    Attributes:
        snapshots: The figures, as the server answers them for the caller's token.
        previews: Reads rows with it; None: rows are not shown.
        close: Ends its client; may block.
    """

    snapshots: Snapshots
    previews: RowPreviews | None = None
    close: Callable[[], None] = field(default=lambda: None)


class Viewers:
    """Finds the viewer of a call.

    Args:
        own: The viewer of the observer itself: for questions about the health of the server, and for all if the
            server has no token.
        asks_token: Whether the server has tokens.
        open_viewer: Opens the viewer of a token.
        check_token: Asks the server whether it accepts a token; blocks. Raises UnauthenticatedError if not, and another
            TDServeError if the server does not answer.
        known: A token whose logins outlast a restart of this process.
    """

    def __init__(
        self,
        own: Viewer,
        *,
        asks_token: bool,
        open_viewer: Callable[[str], Viewer],
        check_token: Callable[[str], None],
        known: str | None = None,
    ) -> None:
        self.own = own
        self.asks_token = asks_token
        self._open_viewer = open_viewer
        self._check_token = check_token
        self._turn = asyncio.Lock()
        self._viewers: OrderedDict[str, tuple[Viewer, float]] = OrderedDict()  # by token, with the time of its check
        self._logins: OrderedDict[str, str] = OrderedDict()  # tokens by cookie
        if known is not None:
            self.remember(known)

    async def find(self, token: str) -> Viewer | None:
        """Returns the viewer of a token; None if the server does not accept it.

        Raises:
            TDServeError: The server does not answer, and has not accepted the token before.
        """
        async with self._turn:  # so that guesses come one at a time
            found = self._viewers.get(token)
            if found is not None and time.monotonic() - found[1] < CHECK_AGAIN_S:
                self._viewers.move_to_end(token)
                return found[0]
            try:
                await asyncio.to_thread(self._check_token, token)
            except (UnauthenticatedError, InvalidRequestError):
                await self._drop(token)
                return None
            except TDServeError:
                if found is None:
                    raise
                # Its pages report that the server does not answer.
            viewer = self._open_viewer(token) if found is None else found[0]
            self._viewers[token] = viewer, time.monotonic()
            self._viewers.move_to_end(token)
            if len(self._viewers) > MAX_VIEWERS:
                await self._drop(next(iter(self._viewers)))
            return viewer

    async def _drop(self, token: str) -> None:
        viewer, _ = self._viewers.pop(token, (None, 0.0))
        if viewer is not None:
            await asyncio.to_thread(viewer.close)

    def remember(self, token: str) -> str:
        """Remembers a login; returns its cookie."""
        cookie = make_cookie(token)
        self._logins[cookie] = token
        while len(self._logins) > MAX_VIEWERS:
            self._logins.popitem(last=False)
        return cookie

    def find_login(self, cookie: str) -> str | None:
        """Returns the token of a login; takes as long whichever part of a wrong cookie is right."""
        given = cookie.encode(errors="replace")
        tokens = [token for known, token in self._logins.items() if hmac.compare_digest(given, known.encode())]
        return tokens[0] if tokens else None


def make_cookie(token: str) -> str:
    """Returns what a login leaves in a browser: it proves the token, and does not contain it."""
    return hmac.new(token.encode(), b"tdserve observer login", hashlib.sha256).hexdigest()
