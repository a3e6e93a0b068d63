"""Files sent ahead: kept for a while, for their tenant, and for other gateways."""

import hashlib

import pytest

from gateway.items import Modality
from gateway.uploads import EXPIRES_S, Uploads
from mimo.errors import InvalidRequest, Reason
from mimo.store.memory_store import MemoryStore
from tests.support.media import gradient, image_file, tone, wav_file

PICTURES = [image_file(gradient(size, size)) for size in (8, 16, 24)]
SOUND = wav_file(tone(0.1))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Forgetful(MemoryStore):
    """A store that takes nothing: only the process's own memory is left."""

    async def put(self, *args: object, **kwargs: object) -> None:  # type: ignore[override]
        return None


async def test_an_upload_is_named_by_its_content() -> None:
    uploads = Uploads(MemoryStore())
    upload = await uploads.add(SOUND, b"")
    assert upload.reference == f"media_{hashlib.sha256(SOUND).hexdigest()}"
    assert (upload.modality, upload.num_bytes) == (Modality.AUDIO, len(SOUND))
    assert await uploads.add(SOUND, b"") == upload
    assert await uploads.get(f"media:{upload.reference}", b"") == SOUND


async def test_another_tenant_does_not_see_it() -> None:
    uploads = Uploads(MemoryStore())
    upload = await uploads.add(SOUND, b"a")
    assert await uploads.get(f"media:{upload.reference}", b"b") is None
    assert await uploads.get(f"media:{upload.reference}", b"") is None
    assert await uploads.get(f"media:{upload.reference}", b"a") == SOUND


async def test_another_gateway_finds_it_in_the_store() -> None:
    store = MemoryStore()
    upload = await Uploads(store).add(SOUND, b"")
    assert await Uploads(store).get(f"media:{upload.reference}", b"") == SOUND
    assert await Uploads(MemoryStore()).get(f"media:{upload.reference}", b"") is None


async def test_it_expires_an_hour_after_its_last_use() -> None:
    clock = Clock()
    uploads = Uploads(Forgetful(), clock=clock)
    url = f"media:{(await uploads.add(SOUND, b'')).reference}"
    clock.now = EXPIRES_S - 1
    assert await uploads.get(url, b"") == SOUND
    clock.now += EXPIRES_S - 1
    assert await uploads.get(url, b"") == SOUND
    clock.now += EXPIRES_S
    assert await uploads.get(url, b"") is None


async def test_memory_is_bounded_and_the_longest_unused_goes_first() -> None:
    first, second, third = PICTURES
    uploads = Uploads(Forgetful(), max_bytes=len(first) + len(third))
    urls = [f"media:{(await uploads.add(data, b'')).reference}" for data in (first, second)]
    assert await uploads.get(urls[0], b"") == first
    await uploads.add(third, b"")
    assert await uploads.get(urls[0], b"") == first
    assert await uploads.get(urls[1], b"") is None


async def test_one_file_larger_than_the_memory_is_kept_until_the_next() -> None:
    uploads = Uploads(Forgetful(), max_bytes=1)
    urls = [f"media:{(await uploads.add(data, b'')).reference}" for data in PICTURES[:2]]
    assert await uploads.get(urls[1], b"") == PICTURES[1]
    assert await uploads.get(urls[0], b"") is None


async def test_announced_digests_are_checked() -> None:
    uploads = Uploads(MemoryStore())
    assert await uploads.add(SOUND, b"", hashlib.sha256(SOUND).digest())
    for wrong in (hashlib.sha256(b"other").digest(), b"short"):
        with pytest.raises(InvalidRequest) as caught:
            await uploads.add(SOUND, b"", wrong)
        assert (caught.value.reason, caught.value.field) == (Reason.MEDIA_ENCODING, "sha256")


@pytest.mark.parametrize(
    "data, reason", [(b"", Reason.MEDIA_EMPTY), (b"just text", Reason.MEDIA_UNSUPPORTED)]
)
async def test_only_media_are_taken_in(data: bytes, reason: Reason) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await Uploads(MemoryStore()).add(data, b"")
    assert caught.value.reason is reason


@pytest.mark.parametrize("url", ["media:", "media:media_", "media:media_xyz", "media:" + "0" * 64])
async def test_what_is_no_reference_is_unknown(url: str) -> None:
    assert await Uploads(MemoryStore()).get(url, b"") is None
