"""Objects in an S3 bucket, of AWS or of any server that speaks its protocol.

Every object is sent with its SHA-256, which the server checks; a bare PUT appears whole or not at all. What only one
trainer may write is fenced by conditions: a step's manifest is created with `If-None-Match`, a log grows only from the
version that this trainer wrote last, and whoever opens the run later takes it over.
"""

import base64
import hashlib
import io
import random
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, NoCredentialsError, ResponseStreamingError

from populora_trainer.errors import StorageError
from populora_trainer.storage.store import AlreadyExists, MissingObject, check_key

_OWNER = ".owner"
_WRITER = "populora-writer"
_TRIES = 8
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0  # seconds
_MULTIPART = 64 << 20  # bytes from which an object goes up in parts
_SMALLEST_PART = 5 << 20  # what S3 demands of every part but the last
_LARGEST_COPY = 5 << 30  # what one part may copy
_TIMEOUT = 30  # seconds without a byte

_MISSING = ("404", "NoSuchKey", "NotFound")
_REFUSED = ("412", "PreconditionFailed", "409", "ConditionalRequestConflict")

T = TypeVar("T")


class S3Store:
    """An `ObjectStore` under a prefix of a bucket.

    Credentials come from the environment, as boto3 finds them (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile,
    or the pod's identity).
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint: str | None = None,
        region: str | None = None,
        tries: int | None = None,
    ) -> None:
        """Open the bucket; no request is made yet.

        Args:
            bucket: name of the bucket, which exists.
            prefix: of every object's key, without slashes at its ends.
            endpoint: of a server that is not AWS; None takes AWS_ENDPOINT_URL or AWS.
            region: of the bucket; None takes AWS_REGION, or the environment's default.
            tries: of a request that fails in a way that may pass; None for enough to sit out half a minute.

        Raises:
            StorageError: the endpoint is no address.
        """
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._tries = tries or _TRIES
        self._writer = uuid.uuid4().hex
        self._owned = False
        self._met = False  # whether the bucket is known to exist
        self._versions: dict[str, str] = {}
        config = Config(
            connect_timeout=_TIMEOUT,
            read_timeout=_TIMEOUT,
            # Retries are ours alone: a PUT that is repeated must know whether its first try arrived.
            retries={"total_max_attempts": 1},
            s3={"addressing_style": "path"} if endpoint else {},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_supported",
        )
        try:
            session = boto3.session.Session()
            self._client: Any = session.client(
                "s3", endpoint_url=endpoint, region_name=region or session.region_name or "us-east-1", config=config
            )
        except (BotoCoreError, ValueError) as error:
            raise StorageError(f"s3://{bucket} can't be opened: {error}") from error

    @property
    def location(self) -> str:
        """The URI."""
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return an object's bytes, or a range of them. See `ObjectStore`."""
        if length == 0:
            self.size(key)
            return b""
        whole = start == 0 and length is None
        wanted = {} if whole else {"Range": f"bytes={start}-{'' if length is None else start + length - 1}"}

        def read() -> bytes:
            answer = self._client.get_object(**self._named(key), **wanted, ChecksumMode="ENABLED")
            data: bytes = answer["Body"].read()
            if len(data) != answer["ContentLength"]:
                raise ResponseStreamingError(error=f"{len(data)} of {answer['ContentLength']} bytes came")
            return data

        try:
            return self._tried("read", key, read)
        except _RangeError:
            return b""

    def size(self, key: str) -> int:
        """Return the number of an object's bytes. See `ObjectStore`."""
        return int(self._head(key)["ContentLength"])

    def exists(self, key: str) -> bool:
        """Return whether there is such an object."""
        try:
            self._head(key)
        except MissingObject:
            return False
        return True

    def list(self, prefix: str = "") -> list[str]:
        """Return the names of all objects that start with the prefix, sorted."""

        def read() -> list[str]:
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix + prefix
            )
            return [entry["Key"] for page in pages for entry in page.get("Contents", ())]

        names = [key.removeprefix(self._prefix) for key in self._tried("list", prefix, read)]
        return sorted(name for name in names if not any(part.startswith(".") for part in name.split("/")))

    def put(self, key: str, data: bytes) -> None:
        """Write an object, over an earlier one if there is any. See `ObjectStore`."""
        check_key(key)
        if len(data) < _MULTIPART:
            self._tried("write", key, lambda: self._put(key, data))
        else:
            self._tried("write", key, lambda: self._upload(key, data))

    def create(self, key: str, data: bytes) -> None:
        """Write an object that must not exist yet. See `ObjectStore`.

        Raises:
            AlreadyExists: there is such an object, and it is not what an earlier try of this call left.
            StorageError: another trainer has taken the run over.
        """
        check_key(key)
        self._check_owner()
        try:
            self._tried("write", key, lambda: self._put(key, data, IfNoneMatch="*"))
        except _PreconditionError as error:
            # A try whose answer was lost may have arrived: then the object carries this writer's mark.
            if self._head(key).get("Metadata", {}).get(_WRITER) != self._writer or self.get(key) != data:
                raise AlreadyExists(f"{self.location}/{key} exists already") from error

    def extend(self, key: str, at: int, data: bytes) -> None:
        """Make an object its first `at` bytes followed by data. See `ObjectStore`.

        The first bytes are copied inside S3 where they make a part of their own. Nothing is half done after a crash.

        Raises:
            StorageError: another trainer has written the object since this one did, or it is shorter than `at`.
        """
        check_key(key)
        version, size = self._version(key)
        if size < at:
            raise StorageError(f"{self.location}/{key} is damaged: it should have at least {at} bytes, and has {size}")
        if at == size and not data:
            return
        condition = {"IfMatch": version} if version else {"IfNoneMatch": "*"}

        def write() -> str:
            if at < _SMALLEST_PART:
                kept = self.get(key, 0, at) if at else b""
                return self._put(key, kept + data, **condition)
            return self._append(key, at, data, condition)

        try:
            self._versions[key] = self._tried("write", key, write)
        except _PreconditionError as error:
            head = self._head(key)
            if head.get("Metadata", {}).get(_WRITER) == self._writer and head["ContentLength"] == at + len(data):
                self._versions[key] = head["ETag"]
                return
            raise self._taken_over(key) from error

    def delete(self, key: str) -> None:
        """Remove an object; one that does not exist is removed already."""
        check_key(key)
        self._tried("delete", key, lambda: self._client.delete_object(**self._named(key)))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Take the run over for writing. See `ObjectStore`.

        A bucket can't tell whether an earlier trainer is alive, so the last one to come owns the run, and an earlier
        one stops with a sentence at its next commit. Uploads in parts that an earlier one left open are removed.
        """
        self._tried("lock", _OWNER, lambda: self._put(_OWNER, self._writer.encode()))
        self._owned = True
        self._versions.clear()
        self._abort_uploads()
        try:
            yield
        finally:
            self._owned = False
            # A run that was deleted leaves no mark behind.
            if not self.list():
                self._tried("delete", _OWNER, lambda: self._client.delete_object(**self._named(_OWNER)))

    def _check_owner(self) -> None:
        try:
            if self._owned and self.get(_OWNER) != self._writer.encode():
                raise self._taken_over(_OWNER)
        except MissingObject as error:
            raise self._taken_over(_OWNER) from error

    def _taken_over(self, key: str) -> StorageError:
        return StorageError(
            f"another trainer has taken over the run in {self.location} ({key} is not as this one left it); "
            f"this one stops and overwrites nothing"
        )

    def _version(self, key: str) -> tuple[str | None, int]:
        """The ETag that this trainer knows of, or that the object has when it is first met, and the object's size."""
        try:
            head = self._head(key)
        except MissingObject:
            if key in self._versions:
                raise
            return None, 0
        known = self._versions.setdefault(key, head["ETag"])
        if known != head["ETag"]:
            raise self._taken_over(key)
        return known, int(head["ContentLength"])

    def _head(self, key: str) -> Any:
        try:
            return self._tried("read", key, lambda: self._client.head_object(**self._named(key)))
        except MissingObject:
            # The answer to HEAD has no body, so a missing bucket looks like a missing object.
            if not self._met:
                self._tried("read", "", lambda: self._client.list_objects_v2(Bucket=self._bucket, MaxKeys=1))
                self._met = True
            raise

    def _put(self, key: str, data: bytes, **conditions: str) -> str:
        answer = self._client.put_object(
            **self._named(key), Body=data, ChecksumSHA256=_checksum(data), Metadata=self._mark(), **conditions
        )
        return str(answer["ETag"])

    def _upload(self, key: str, data: bytes) -> None:
        self._client.upload_fileobj(
            io.BytesIO(data),
            self._bucket,
            self._prefix + key,
            ExtraArgs={"ChecksumAlgorithm": "SHA256", "Metadata": self._mark()},
            Config=TransferConfig(multipart_threshold=_MULTIPART, multipart_chunksize=_MULTIPART // 4),
        )

    def _append(self, key: str, at: int, data: bytes, condition: dict[str, str]) -> str:
        """Copy the first bytes inside S3 as parts, add the new ones as the last, and put it all in place at once."""
        named = self._named(key)
        upload = self._client.create_multipart_upload(**named, Metadata=self._mark())["UploadId"]
        try:
            parts: list[dict[str, object]] = []
            for start in range(0, at, _LARGEST_COPY):
                copied = self._client.upload_part_copy(
                    **named,
                    UploadId=upload,
                    PartNumber=len(parts) + 1,
                    CopySource=named,
                    CopySourceRange=f"bytes={start}-{min(start + _LARGEST_COPY, at) - 1}",
                    CopySourceIfMatch=condition["IfMatch"],
                )["CopyPartResult"]
                parts.append({"PartNumber": len(parts) + 1, "ETag": copied["ETag"]})
            if data:
                # A SHA-256 here would be demanded of the copied parts as well, which not every server computes.
                check = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
                sent = self._client.upload_part(
                    **named, UploadId=upload, PartNumber=len(parts) + 1, Body=data, ContentMD5=check
                )
                parts.append({"PartNumber": len(parts) + 1, "ETag": sent["ETag"]})
            done = self._client.complete_multipart_upload(
                **named, UploadId=upload, MultipartUpload={"Parts": parts}, **condition
            )
        except BaseException:
            self._abort(key, upload)
            raise
        return str(done["ETag"])

    def _abort(self, key: str, upload: str) -> None:
        # Where this fails, the next trainer that opens the run removes the upload.
        with suppress(BotoCoreError, ClientError):
            self._client.abort_multipart_upload(**self._named(key), UploadId=upload)

    def _abort_uploads(self) -> None:
        def find() -> list[tuple[str, str]]:
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._bucket, Prefix=self._prefix
            )
            return [(entry["Key"], entry["UploadId"]) for page in pages for entry in page.get("Uploads", ())]

        for name, upload in self._tried("list", "unfinished uploads", find):
            self._abort(name.removeprefix(self._prefix), upload)

    def _named(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + (key if key == _OWNER else check_key(key))}

    def _mark(self) -> dict[str, str]:
        return {_WRITER: self._writer}

    def _tried(self, action: str, key: str, call: Callable[[], T]) -> T:
        """Return the call's answer; what may pass by itself is tried again, with growing pauses.

        Raises:
            MissingObject, StorageError: it will not pass by itself, or has not within the tries.
        """
        place = f"{self.location}/{key}"
        for attempt in range(1, self._tries + 1):
            try:
                return call()
            except ClientError as error:
                code, status = _code(error)
                if code in _MISSING:
                    raise MissingObject(f"{place} is missing") from error
                if code in _REFUSED and status != 409:
                    raise _PreconditionError(f"{place} is not as expected") from error
                if code == "InvalidRange":
                    raise _RangeError(f"{place} is shorter") from error
                if code in ("NoSuchBucket",):
                    raise StorageError(f"the bucket {self._bucket} does not exist at this endpoint") from error
                passing = status >= 500 or status in (408, 409, 429) or code in ("SlowDown", "RequestTimeout")
                failure: Exception = error
                if not passing:
                    raise StorageError(f"can't {action} {place}: {_said(error)}") from error
            except NoCredentialsError as error:
                raise StorageError(
                    f"can't {action} {place}: no credentials were found; set AWS_ACCESS_KEY_ID and "
                    f"AWS_SECRET_ACCESS_KEY, or name a Secret in storage.credentialsSecretRef"
                ) from error
            except (HTTPClientError, ResponseStreamingError) as error:
                failure = error
            except BotoCoreError as error:
                raise StorageError(f"can't {action} {place}: {error}") from error
            if attempt < self._tries:
                # Spread over the pause, so that many trainers do not come back in step; no result depends on it.
                pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (attempt - 1))
                time.sleep(pause * (0.5 + random.SystemRandom().random() / 2))
        raise StorageError(f"can't {action} {place} after {self._tries} tries: {_said(failure)}") from failure


class _PreconditionError(StorageError):
    """The object is not in the version that the request was made for."""


class _RangeError(StorageError):
    """The object ends before the range begins."""


def _checksum(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def _code(error: ClientError) -> tuple[str, int]:
    answer = error.response
    return str(answer.get("Error", {}).get("Code", "")), int(
        answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    )


def _said(error: Exception) -> str:
    if isinstance(error, ClientError):
        code, status = _code(error)
        return f"the server answered {status} {code}: {error.response.get('Error', {}).get('Message', '')}".rstrip(": ")
    return str(error)
