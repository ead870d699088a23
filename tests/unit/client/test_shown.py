from __future__ import annotations

from tdserve.client.shown import show_tree
from tdserve.spec.nodes import Form, Node, Ragged, TensorLeaf, ValueLeaf

EXPECTED = """StoreHandle(
    'frames' at host:1,
    fields={
        a: Tensor(shape=torch.Size([4, 2]), device=cpu, dtype=torch.float32, is_shared=False),
        each: NonTensorStack(batch_size=torch.Size([4]), device=None),
        empty: Inner(
            fields={
            },
            batch_size=torch.Size([4]),
            device=None,
            is_shared=False),
        lazy: LazyStackedTensorDict(
            fields={
                r: Tensor(shape=torch.Size([4, -1]), device=cpu, dtype=torch.int64, is_shared=False)},
            batch_size=torch.Size([4]),
            device=None,
            is_shared=False,
            stack_dim=0),
        one: NonTensorData(batch_size=torch.Size([4]), device=None)},
    batch_size=torch.Size([4]),
    device=None,
    is_shared=False)"""


def test_tree_when_shown_then_as_tensordicts_show_themselves() -> None:
    ragged = ValueLeaf((4,), True, Ragged(Form.STACK, "int64", (-1,)))
    entries = (
        ("one", ValueLeaf((4,), False)),
        ("a", TensorLeaf("float32", (4, 2))),
        ("empty", Node((4,), None, None, "some.module.Inner", ())),
        ("each", ValueLeaf((4,), True)),
        ("lazy", Node((4,), None, None, None, (("r", ragged),), stack_dim=0)),
    )
    shown = show_tree("'frames' at host:1", Node((4,), None, None, None, entries), kind="StoreHandle", device=None)
    assert shown == EXPECTED
