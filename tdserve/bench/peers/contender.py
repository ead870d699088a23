"""What a system is asked to do: tables of rows, weights and single tensordicts, by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType

from tensordict import TensorDict, TensorDictBase


class Contender(ABC):
    """One system with its server and one client, which is this process. A context manager.

    What a call has done is there for any other client when it returns, unless it says otherwise. Threads: one caller.

    Attributes:
        label: Name of the system in the table.
    """

    label: str

    @classmethod
    @abstractmethod
    def find_missing(cls) -> str:
        """Returns what this machine lacks for the system, and how to get it; "" if it lacks nothing."""

    @abstractmethod
    def open(self, folder: Path) -> None:
        """Starts the server, and connects to it.

        Args:
            folder: Empty; for its files.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends all that was started; also after a failed ``open``."""

    @abstractmethod
    def create(self, name: str, row: TensorDict, capacity: int) -> None:
        """Creates a table of rows like this one, from which samples are drawn."""

    @abstractmethod
    def extend(self, name: str, rows: TensorDict) -> None:
        """Writes rows to a table; older ones make room."""

    @abstractmethod
    def sample(self, name: str, num_rows: int) -> TensorDictBase:
        """Returns rows of a table, drawn at random, each with the same probability."""

    @abstractmethod
    def put(self, name: str, value: TensorDict) -> None:
        """Stores a tensordict, in the place of an earlier one of this name."""

    @abstractmethod
    def get(self, name: str) -> TensorDictBase:
        """Returns the tensordict of a name."""

    def send(self, name: str, rows: TensorDict) -> None:
        """Writes rows as fast as the system takes them; they are there after ``flush``."""
        self.extend(name, rows)

    def send_one(self, name: str, row: TensorDict) -> None:
        """Writes one row as fast as the system takes single rows; it is there after ``flush``."""
        self.extend(name, row.unsqueeze(0))

    def flush(self) -> None:  # noqa: B027 (most have nothing under way)
        """Waits until all that was sent is there."""

    def publish(self, name: str, weights: TensorDict) -> None:
        """Makes a version of weights visible."""
        self.put(name, weights)

    def pull(self, name: str, into: TensorDict) -> TensorDictBase:
        """Returns the newest version of weights, in ``into`` if the system can receive it there."""
        return self.get(name)

    def __enter__(self) -> Contender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
