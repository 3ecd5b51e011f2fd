import torch

from graft.transfer import ALIGNMENT, _side_by_side, transfer

CPU = torch.device("cpu")


def test_tensors_of_any_type_and_shape_come_out_as_they_went_in():
    tensors = {
        "long": torch.arange(7),
        "flags": torch.tensor([[True, False, True]]),
        "nothing": torch.zeros(0, 5),
        "floats": torch.randn(3, 5),
        "turned": torch.randn(4, 6).t(),
        "repeated": torch.tensor([[2.0]]).expand(3, 4),
        "half": torch.randn(5).bfloat16(),
        "one": torch.tensor(3),
    }
    moved = _side_by_side(tensors, CPU, pinned=False)
    assert list(moved) == list(tensors)
    for name, tensor in tensors.items():
        assert moved[name].dtype == tensor.dtype
        assert torch.equal(moved[name], tensor)
        place = moved[name].storage_offset() * tensor.element_size()
        assert moved[name].is_contiguous() and place % ALIGNMENT == 0


def test_nothing_at_all_can_be_sent():
    nothing = _side_by_side({"empty": torch.zeros(0, dtype=torch.long)}, CPU, pinned=False)
    assert nothing["empty"].shape == (0,)


def test_what_is_there_already_is_not_copied():
    tensor = torch.arange(3)
    assert transfer({"x": tensor}, CPU)["x"] is tensor
