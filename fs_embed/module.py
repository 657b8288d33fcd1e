"""What all modules with sharded tables share: looking ahead, statistics, and state."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from fs_embed.optim import RowOptimizer
from fs_embed.rows import TableConfig
from fs_embed.tables import Piece, ShardedTables, Sharding


@runtime_checkable
class JaggedIds(Protocol):
    """Ids of rows of different lengths, such as `fs_data.JaggedColumn`."""

    @property
    def values(self) -> Tensor: ...
    @property
    def offsets(self) -> Tensor: ...


class PrioritizedModule(nn.Module):
    """A module whose tables are sharded by rows; its state is under the keys of the module that it replaces."""

    feature_names: tuple[str, ...] = ()
    """The features that it takes out of a `KeyedJaggedTensor`."""

    def __init__(
        self,
        tables: Sequence[TableConfig],
        weights: Sequence[Tensor] | None,
        keys: Sequence[str],
        *,
        optimizer: RowOptimizer,
        sharding: Sharding,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.tables = ShardedTables(tables, weights, optimizer=optimizer, sharding=sharding, device=device)
        self.state_keys = tuple(keys)
        """Of each table's weight in the module's state."""

    def sources(self, ids: Any) -> tuple[list[Tensor], list[Piece]]:
        """The tensors by which a lookup is known again, and what it looks up."""
        raise NotImplementedError

    def prefetch(self, ids: Sequence[Any] | None) -> None:
        """Announces one forward's lookups in call order, or with None that none follows; ids leave for their owners.

        May run any number of batches ahead, in the order in which they will be looked up. None a second time says that
        the loop is over. In evaluation mode it does nothing, and what was announced before stays announced.
        """
        if self.training:
            self.tables.prefetch(None if ids is None else [self.sources(x) for x in ids])

    def flush(self) -> None:
        """Waits until all updates are in the tables; needs no other rank to call it too."""
        self.tables.flush()

    def close(self) -> None:
        """Ends the exchange threads; the tables can be read on."""
        self.tables.close()

    def stats(self) -> dict[str, float]:
        """`exposed_wait_s` (training thread blocked), `bytes_sent`, `hits`, `misses` and `absences` of announced
        batches, `skipped_updates` (a gradient was not finite), and bytes and seconds by phase."""
        return self.tables.stats()

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """For the key of each weight, `<table>.<name>` of its optimizer's state, sharded as the weight.

        TorchRec's layout; where steps are counted, with their number as `<table>.num_steps`.
        """
        self.flush()
        return {key: self._state_of(number) for number, key in enumerate(self.state_keys)}

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes what `optimizer_state` gave, on any number of ranks; without a number of steps it stays as it is."""
        for number, key in enumerate(self.state_keys):
            table, store = self.tables.tables[number].name, self.tables.store_of(number)
            self.tables.load(number, {name: state[key][f"{table}.{name}"] for name in store.state})
            store.num_steps = int(state[key].get(f"{table}.num_steps", store.num_steps))

    def _state_of(self, number: int) -> dict[str, Tensor]:
        table, store = self.tables.tables[number].name, self.tables.store_of(number)
        state = {f"{table}.{name}": value for name, value in self.tables.state(number).items()}
        if store.optimizer.counts_steps:
            state[f"{table}.num_steps"] = torch.tensor(store.num_steps)
        return state

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.flush()
        for number, key in enumerate(self.state_keys):
            destination[prefix + key] = self.tables.weight(number)

    def _load_from_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]  torch declares these keyword only
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for number, key in enumerate(self.state_keys):
            if prefix + key in state_dict:
                try:
                    self.tables.load(number, {"weight": state_dict[prefix + key]})
                except ValueError as error:
                    error_msgs.append(str(error))
            elif strict:
                missing_keys.append(prefix + key)
        if strict:
            mine = {prefix + key for key in self.state_keys}
            unexpected_keys += [k for k in state_dict if k.startswith(prefix) and k not in mine]

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                f"{type(self).__name__} has no .weight to use or tie: its rows are spread over the ranks and updated "
                "in the backward; state_dict() has it as a sharded tensor"
            )
        return cast("Any", super().__getattr__(name))
