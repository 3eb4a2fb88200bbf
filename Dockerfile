# The images of PopuLoRA, a target each: trainer, sandbox, sidecar and controller, which is the default. docs/images.md
# says how to build, pin and run them. Docker and buildah build this file alike.

# An image with Python 3.11 or newer as `python3`, with venv and ensurepip, and with no packages of Python's but pip's.
# The tag names one Python; a digest pins its bytes: python:3.11.14-slim-bookworm@sha256:...
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm
ARG VERSION=0.1.0
ARG REVISION=unknown


# --- What builds. None of these stages is in an image, only the environment that it makes.

FROM ${PYTHON_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
COPY requirements/build.txt requirements/
RUN python3 -m venv tools \
    && tools/bin/pip install --require-hashes --only-binary=:all: -r requirements/build.txt \
    && python3 -m venv --without-pip /opt/populora

FROM build AS wheel
COPY LICENSE README.md pyproject.toml ./
COPY api api
COPY operator operator
COPY trainer trainer
RUN tools/bin/python -m hatchling build --target wheel --directory dist

# Every environment is made at the path, and by the interpreter, that it is used with: virtual environments cannot be
# moved. pip compiles what it installs, as nothing could write bytecode under a read-only root.

FROM build AS controller-environment
COPY requirements/controller.txt requirements/
# Of the Kubernetes client the controller uses the transport; it imports neither the generated calls, which are 55 MB,
# nor the models.
RUN tools/bin/pip --python /opt/populora install --require-hashes --only-binary=:all: -r requirements/controller.txt \
    && find /opt/populora/lib/python3.*/site-packages/kubernetes \
        \( -path '*/client/api/*' -o -path '*/client/models/__pycache__/[!_]*' \) -delete
COPY --from=wheel /build/dist dist
RUN tools/bin/pip --python /opt/populora install --no-index --no-deps dist/*.whl

FROM build AS sandbox-environment
COPY requirements/sandbox.txt requirements/
RUN tools/bin/pip --python /opt/populora install --require-hashes --only-binary=:all: -r requirements/sandbox.txt
COPY --from=wheel /build/dist dist
RUN tools/bin/pip --python /opt/populora install --no-index --no-deps dist/*.whl

FROM build AS sidecar-environment
COPY requirements/sidecar.txt requirements/
RUN tools/bin/pip --python /opt/populora install --require-hashes --only-binary=:all: -r requirements/sidecar.txt
COPY --from=wheel /build/dist dist
RUN tools/bin/pip --python /opt/populora install --no-index --no-deps dist/*.whl

FROM build AS trainer-environment
# requirements/sidecar.txt makes an image without torch, for nodes that mount an environment with it: docs/images.md.
ARG TRAINER_REQUIREMENTS=requirements/trainer.txt
COPY ${TRAINER_REQUIREMENTS} trainer-requirements.txt
# trueskill comes as source; it is built with the pinned setuptools of requirements/build.txt, not with the newest.
RUN tools/bin/pip wheel --no-deps --no-build-isolation --require-hashes -r trainer-requirements.txt --wheel-dir wheels \
    && tools/bin/pip --python /opt/populora install --no-index --no-deps wheels/*.whl \
    && rm -r wheels
COPY --from=wheel /build/dist dist
RUN tools/bin/pip --python /opt/populora install --no-index --no-deps dist/*.whl


# --- The images.

FROM ${PYTHON_IMAGE} AS runtime
# Nothing is installed at run time and nobody becomes another user: pip and setuid bits go. The public image comes
# without the standard library's bytecode, which would be compiled anew in every process under a read-only root.
RUN rm -rf /usr/local/lib/python3.*/site-packages/* /usr/local/bin/pip* /usr/local/lib/python3.*/ensurepip \
        /usr/lib/python3.*/ensurepip /usr/share/python-wheels \
    && find / -xdev -type f -perm /6000 -exec chmod ug-s {} + \
    && python3 -m compileall -q -x '/(idlelib|lib2to3|test|tkinter|turtledemo)/' \
        "$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
# No user has an entry in /etc/passwd, so that every one is as good as another: HOME and USER say what it would.
ENV PATH=/opt/populora/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    HOME=/tmp \
    USER=populora \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /tmp
USER 10001:10001
ENTRYPOINT ["populora"]

FROM runtime AS trainer
# PyTorch's wheels bring CUDA. The node brings NVIDIA's driver and container toolkit, and a pod that asks for
# nvidia.com/gpu gets its GPUs; the variable says which of the driver's libraries are mounted.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=trainer-environment /opt/populora /opt/populora
EXPOSE 9090
CMD ["run", "/etc/populora/run.yaml", "--listen", "0.0.0.0:9090"]
ARG VERSION
ARG REVISION
LABEL org.opencontainers.image.title="PopuLoRA trainer" \
      org.opencontainers.image.description="Trains, evaluates and cleans up a population of LoRA adapters" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

FROM runtime AS sandbox
COPY --from=sandbox-environment /opt/populora /opt/populora
EXPOSE 8080
CMD ["sandbox", "serve", "--listen", "0.0.0.0:8080"]
ARG VERSION
ARG REVISION
LABEL org.opencontainers.image.title="PopuLoRA sandbox" \
      org.opencontainers.image.description="Executes untrusted programs for the verifier" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

FROM runtime AS sidecar
COPY --from=sidecar-environment /opt/populora /opt/populora
EXPOSE 8001
CMD ["sidecar", "--listen", "0.0.0.0:8001"]
ARG VERSION
ARG REVISION
LABEL org.opencontainers.image.title="PopuLoRA sidecar" \
      org.opencontainers.image.description="Keeps the adapters that vLLM serves equal to what the trainer published" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

FROM runtime AS controller
COPY --from=controller-environment /opt/populora /opt/populora
EXPOSE 8080 8081
CMD ["controller"]
ARG VERSION
ARG REVISION
LABEL org.opencontainers.image.title="PopuLoRA controller" \
      org.opencontainers.image.description="Reconciles PopulationRuns in a Kubernetes cluster" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
