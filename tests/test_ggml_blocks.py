"""The block formats: golden bytes, and a plain reading of each format's description, one element at a time."""

import hashlib
import struct

import numpy as np
import pytest

from shmserve import ggml_blocks
from shmserve.ggml_blocks import TENSOR_TYPES, GGUFError, dequantize

# type -> (a block in hex, values of some elements, SHA-256 of all values as float32). The values are those of
# ggml's own Python package, version 0.19.
GOLDEN: dict[str, tuple[str, dict[int, float], str]] = {
    "Q5_0": (
        "202ae5f1a94106a0956a26afbccdafe562f90a945f56",
        {0: 0.287109375, 1: -0.765625, 31: -0.5263671875},
        "b0f3c710b26e5acc483041ab2e1b3e5952845d2f406c4b3ee7662032d86d6a24",
    ),
    "Q5_1": (
        "202a00b6ab2da7394551370e99b2d74c3427fa48d732a1df",
        {0: 0.6298828125, 1: 0.4384765625, 31: 0.2470703125},
        "1f6c61d3eb37d6a710883c8d241e6fa5591c4a6feb97334bd7b98ba4ea3f7f5c",
    ),
    "Q4_K": (
        "202a00b626115901dd06f27f8f063cd25e19a621f9bd0ccc21397c1ec795ca7748dc03d17a88934d85527357"
        "a2e64647f03e2fb81f223f4192c58efd5185f0711ef7677a1f132a818d882195a100b28d6b236b82481bd9fe"
        "630dc3ce3be4ebcab72f45b35223479f6e794d57037e2cfde9e15a7789781e3721a557d8e5a703296dcb81db"
        "3f65cf9c1bdc5d1d8fc83f0b",
        {
            0: 36.33203125,
            1: 27.240234375,
            31: 23.603515625,
            32: 6.3173828125,
            100: 23.6728515625,
            128: 28.8955078125,
            200: 20.46484375,
            255: 10.875,
        },
        "06ceaf27008f56d6a3cf0fb7228ccfcc2544690dd1c62bcc6432f5d2fce782de",
    ),
    "Q5_K": (
        "202a00b6be572209851d3d24f4c0cf83fe4363f82f4759778955f6ced681cbea7179ced2c8f814a13472ff70"
        "ce369d8385452a44f318337f08cd1e614f235d3f83bc45fee9ee0403a79be118544441317c9311f85e0429b1"
        "9f7ec0e156f65a3322e791b880ee995e3f0d307d2fbaf400693a179e0d027ed4e58be7a9ebc28a271d43a788"
        "55638144eb6603f7b2725de11fe6ac2f88a68182869793f0aad6ded8116e3ab51681c4a374fec70a68b3e4bd",
        {
            0: 16.708984375,
            1: 64.177734375,
            31: 52.310546875,
            32: 37.2890625,
            100: 22.5439453125,
            128: 60.69140625,
            200: 8.806640625,
            255: 6.8759765625,
        },
        "490c4427c2da9627f60597afe16e1b70e1faf57c364ca018ef837ad249ff1128",
    ),
    "Q6_K": (
        "c92b387987416c17ec90963ec766888ab4b80eba7c5cfd81121bea9cee1810dfd5169faf26cd7b5c30c8aba4"
        "4d972299e8c7b41b9a1d2b0f180600a974d63b6332202c998e82b2522c49c4394c7d73265b6aaf61b288fbd0"
        "aecfa766616223611e764c93aa388ffabd0a6a6412b209971e2d827076f7e49ab8fa197271be53a3442b128c"
        "dad72bad0f8aeef42a0b9a26d74fc78f2562b8701097a55b5510543d27ed600de3200a6749307fd37899c118"
        "819af6674394c3f7aa5f93f32c810a37ca7bf1013ccdf8ab8ab4a6039954e84c202a",
        {
            0: 59.431640625,
            1: -69.767578125,
            31: -5.8857421875,
            32: 7.8955078125,
            100: -6.890625,
            128: -101.63671875,
            200: 147.861328125,
            255: -80.0078125,
        },
        "f15755e6223d32ffd36645652b541836867ad2300633059f0c45f63892222ad4",
    ),
}
SIZES = {name: (elements, size) for name, elements, size in TENSOR_TYPES.values()}


def half(block: bytes, at: int) -> np.float32:
    return np.float32(struct.unpack_from("<e", block, at)[0])


def plain_q5_0(block: bytes, i: int) -> np.float32:
    nibble = block[6 + i % 16] >> 4 * (i // 16) & 15
    fifth = int.from_bytes(block[2:6], "little") >> i & 1
    return half(block, 0) * np.float32((nibble | fifth << 4) - 16)


def plain_q5_1(block: bytes, i: int) -> np.float32:
    nibble = block[8 + i % 16] >> 4 * (i // 16) & 15
    fifth = int.from_bytes(block[4:8], "little") >> i & 1
    return half(block, 0) * np.float32(nibble | fifth << 4) + half(block, 2)


def six_bit_pair(packed: bytes, j: int) -> tuple[int, int]:
    """(scale, minimum) of the j-th 32 elements of Q4_K and Q5_K, from the 12 bytes."""
    if j < 4:
        return packed[j] & 63, packed[4 + j] & 63
    low = packed[4 + j]
    return low & 15 | packed[j - 4] >> 6 << 4, low >> 4 | packed[j] >> 6 << 4


def plain_k(block: bytes, i: int, integer: int) -> np.float32:
    scale, minimum = six_bit_pair(block[4:16], i // 32)
    d, m = half(block, 0) * np.float32(scale), half(block, 2) * np.float32(minimum)
    return d * np.float32(integer) - m


def plain_q4_k(block: bytes, i: int) -> np.float32:
    byte = block[16 + i // 64 * 32 + i % 32]
    return plain_k(block, i, byte >> 4 if i % 64 >= 32 else byte & 15)


def plain_q5_k(block: bytes, i: int) -> np.float32:
    byte = block[48 + i // 64 * 32 + i % 32]
    fifth = block[16 + i % 32] >> i // 32 & 1
    return plain_k(block, i, (byte >> 4 if i % 64 >= 32 else byte & 15) | fifth << 4)


def plain_q6_k(block: bytes, i: int) -> np.float32:
    half_at, within = divmod(i, 128)
    byte = block[half_at * 64 + within % 64]
    low = byte >> 4 if within >= 64 else byte & 15
    high = block[128 + half_at * 32 + within % 32] >> 2 * (within // 32) & 3
    (scale,) = struct.unpack_from("b", block, 192 + i // 16)
    return half(block, 208) * np.float32(scale) * np.float32((low | high << 4) - 32)


PLAIN = {
    "Q5_0": plain_q5_0,
    "Q5_1": plain_q5_1,
    "Q4_K": plain_q4_k,
    "Q5_K": plain_q5_k,
    "Q6_K": plain_q6_k,
}


@pytest.mark.parametrize("type_name", GOLDEN)
def test_golden_blocks_give_ggmls_own_values(type_name):
    packed, some, digest = GOLDEN[type_name]
    values = dequantize(
        type_name,
        np.frombuffer(bytes.fromhex(packed), np.uint8),
        (1, 256 if "K" in type_name else 32),
    )
    assert values.dtype == np.float32
    assert {i: float(values[0, i]) for i in some} == some
    assert hashlib.sha256(values.astype("<f4").tobytes()).hexdigest() == digest


@pytest.mark.parametrize("type_name", PLAIN)
def test_random_blocks_are_read_as_the_format_is_described(type_name):
    elements, size = SIZES[type_name]
    blocks = np.random.default_rng(3).integers(0, 256, (12, size), dtype=np.uint8)
    halves = {"Q5_0": 1, "Q6_K": 1}.get(type_name, 2)
    at = size - 2 if type_name == "Q6_K" else 0
    for block in blocks:  # any float16 but those that are none
        block[at : at + 2 * halves].view("<f2")[:] = np.random.default_rng(size).normal(
            0, 2, halves
        )
    values = dequantize(type_name, blocks.reshape(-1), (3, 4 * elements)).reshape(12, elements)
    for block, row in zip(blocks, values, strict=True):
        expected = [PLAIN[type_name](block.tobytes(), i) for i in range(elements)]
        assert row.tolist() == [float(value) for value in expected]


@pytest.mark.parametrize("type_name", ["F32", "BF16", "Q8_0", "Q5_K"])
def test_tensors_larger_than_a_chunk_are_put_together_whole(monkeypatch, type_name):
    elements, size = SIZES[type_name]
    raw = np.random.default_rng(5).integers(0, 60, 7 * 512 // elements * size, dtype=np.uint8)
    whole = dequantize(type_name, raw, (7, 512))
    monkeypatch.setattr(ggml_blocks, "CHUNK_ELEMENTS", 1024)
    assert np.array_equal(dequantize(type_name, raw, (7, 512)), whole)
    assert len(np.unique(whole)) > 100


@pytest.mark.parametrize("type_name", ["Q2_K", "Q3_K", "IQ4_XS", "MXFP4", "I8"])
def test_types_without_an_unpacking_are_refused_by_name(type_name):
    _, size = SIZES[type_name]
    with pytest.raises(
        GGUFError, match=rf"type {type_name} cannot be read \(readable: BF16, .*Q6_K"
    ):
        dequantize(type_name, np.zeros(size, np.uint8), (1, SIZES[type_name][0]))
