"""Stateful sessions: the worker that keeps each one, and when it ends.

A request with the header `X-Amzn-SageMaker-Session-Id: NEW_SESSION` opens one. Its state is
`context.session`, a dict in one worker, which gets all its requests. It ends by
`context.close_session()`, by time, or with its worker.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from dataclasses import dataclass

from amphora.serving.protocol.media_types import Fault

HEADER = "x-amzn-sagemaker-session-id"
NEW_HEADER = "x-amzn-sagemaker-new-session-id"
CLOSED_HEADER = "x-amzn-sagemaker-closed-session-id"
_NEW = "NEW_SESSION"


class SessionGone(Fault):
    """The session is unknown, or has ended."""

    def __init__(self, session: str) -> None:
        remedy = f"Open one with the header X-Amzn-SageMaker-Session-Id: {_NEW}."
        message = f"There is no session {session[:80]!r}, or it has ended. {remedy}"
        super().__init__(400, "session_closed", message)
        self.session = session


@dataclass
class Session:
    id: str
    worker: int
    """The process id of the worker that keeps its state."""
    expires: float
    """Seconds since the epoch."""
    is_new: bool = True

    @property
    def announcement(self) -> str:
        """Return the value of X-Amzn-SageMaker-New-Session-Id."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.expires))
        return f"{self.id}; Expires={moment}"


class Sessions:
    """The open sessions of one model. An unused one ends after `lifetime` seconds."""

    def __init__(self, lifetime: float, most: int = 1024) -> None:
        self._lifetime, self._most = lifetime, most
        self._open: dict[str, Session] = {}
        """In the order of their last use, which is that of their end."""

    def __len__(self) -> int:
        return len(self._open)

    def find(self, header: str, workers: list[int]) -> Session:
        """Return the session that a header names; a new one goes to the worker with the fewest.

        Raises SessionGone if the header names none that is open, Fault (503) if too many are.
        """
        if header == _NEW:
            if len(self._open) >= self._most:
                count = f"{len(self._open)} sessions are open, the most that are allowed."
                message = f"{count} Close one, or try again later."
                raise Fault(503, "too_many_sessions", message)
            held = Counter(session.worker for session in self._open.values())
            worker = min(workers, key=held.__getitem__)
            session = Session(uuid.uuid4().hex, worker, time.time() + self._lifetime)
            self._open[session.id] = session
            return session
        known = self._open.get(header)
        if known is None or known.expires <= time.time() or known.worker not in workers:
            self.end(header)
            raise SessionGone(header)
        known.is_new = False
        known.expires = time.time() + self._lifetime
        self._open[header] = self._open.pop(header)
        return known

    def end(self, session_id: str) -> None:
        """Forget a session that its handler has closed or whose worker has ended."""
        self._open.pop(session_id, None)

    def lose(self, worker: int) -> None:
        """Forget the sessions of a worker that has ended."""
        self._open = {name: it for name, it in self._open.items() if it.worker != worker}

    def expired(self) -> list[Session]:
        """Remove the sessions whose time is over and return them, for their workers to forget."""
        now = time.time()
        over: list[Session] = []
        while self._open and (oldest := next(iter(self._open.values()))).expires <= now:
            over.append(oldest)
            self.end(oldest.id)
        return over
