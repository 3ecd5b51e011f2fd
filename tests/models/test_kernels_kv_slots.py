"""Keys and values written directly to their pages equal rotating first and storing afterwards."""

from __future__ import annotations

import pytest
import torch

from graft.models.angles import HeadRotation
from graft.models.kv_slots import KVSlots

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 16), (3, 1, 64), (2, 2, 8)])
@pytest.mark.parametrize("has_norm", [True, False])
def test_keys_and_values_are_written_to_the_slots_of_rows_that_are_alive(
    heads, kv_heads, size, has_norm, kernel_device
):
    from graft.models.kernels.rope import qk_rotate, qk_rotate_to_slots

    generator = torch.Generator().manual_seed(size)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(kernel_device)

    def ints(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, device=kernel_device)

    qkv = draw(4, (heads + 2 * kv_heads) * size)
    weights = (draw(size), draw(size)) if has_norm else (None, None)
    angles = (draw(4, size // 2), draw(4, size // 2))
    table = torch.tensor([[4, 2], [5, 0], [1, 0]], dtype=torch.int32, device=kernel_device)
    rows, positions = ints(0, 0, 1, 2), ints(15, 16, 3, 0)
    lengths = ints(17, 4, 0)  # row 2 is over
    pools = torch.full((2, 2, 2, 6, kv_heads, 16, size), torch.nan, device=kernel_device)
    kv_slots, plain = (KVSlots(pool, table, rows, positions, lengths) for pool in pools)
    how = HeadRotation(*weights, 1e-6, *angles, heads, kv_heads)
    q = qk_rotate_to_slots(qkv, how, kv_slots, 1)
    want, k, v = qk_rotate(qkv, how)
    plain.write(1, k, v)
    torch.testing.assert_close(q, want)
    torch.testing.assert_close(kv_slots.pool, plain.pool, equal_nan=True)
    for token, (page, slot) in enumerate([(4, 15), (2, 0), (5, 3)]):
        torch.testing.assert_close(kv_slots.pool[1, 0, page, :, slot], k[token])
        torch.testing.assert_close(kv_slots.pool[1, 1, page, :, slot], v[token])
    assert int((~kv_slots.pool.isnan()).sum()) == 2 * 3 * kv_heads * size
