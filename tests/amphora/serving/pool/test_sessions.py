"""The table of open sessions, without a server."""

import time

import pytest

from amphora.serving.pool.sessions import Session, SessionGone, Sessions
from amphora.serving.protocol.media_types import Fault


def opened(sessions: Sessions, workers: list[int]) -> Session:
    session = sessions.find("NEW_SESSION", workers)
    assert session is not None
    return session


def test_new_sessions_spread_and_are_bounded() -> None:
    sessions = Sessions(600, most=4)
    made = [opened(sessions, [1, 2]) for _ in range(4)]
    assert sorted(session.worker for session in made) == [1, 1, 2, 2]
    with pytest.raises(Fault, match="4 sessions are open") as refused:
        opened(sessions, [1, 2])
    assert refused.value.status == 503
    sessions.lose(1)
    assert len(sessions) == 2
    for session in made:
        if session.worker == 2:
            assert sessions.find(session.id, [2]) is session
    assert [opened(sessions, [2, 3]).worker for _ in range(2)] == [3, 3]


def test_sessions_end_in_the_order_of_their_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    sessions = Sessions(10, most=100)
    first, second = opened(sessions, [1]), opened(sessions, [1])
    now += 5
    sessions.find(first.id, [1])
    now += 6
    assert sessions.expired() == [second]
    assert len(sessions) == 1
    with pytest.raises(SessionGone):
        sessions.find(second.id, [1])
    now += 10
    assert sessions.expired() == [first]
