# A small image of `insertlm serve` on a CPU. How to build and run it: docs/serving.md

FROM python:3.11-slim AS build
RUN python -m venv /venv
WORKDIR /build
# torch alone and first: it is by far the largest layer and changes rarely. The usual build brings gigabytes of CUDA; with the
# address of PyTorch's index for CPUs, --build-arg PIP_EXTRA_INDEX_URL=ADDRESS, pip takes the one without.
ARG PIP_EXTRA_INDEX_URL=
COPY constraints.txt ./
RUN /venv/bin/pip install --no-cache-dir -c constraints.txt torch
COPY pyproject.toml MANIFEST.in README.md LICENSE ./
COPY src ./src
RUN /venv/bin/pip install --no-cache-dir -c constraints.txt '.[patterns,serve]'

# The environment without the sources and the build's leftovers.
FROM python:3.11-slim
RUN useradd --create-home insertlm
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH
USER insertlm
WORKDIR /home/insertlm
EXPOSE 8000
HEALTHCHECK --start-period=60s --timeout=5s \
  CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# In a container 127.0.0.1 would be reachable from nowhere else. Models and options come after the name of the image.
ENTRYPOINT ["insertlm", "serve", "--host", "0.0.0.0", "--port", "8000"]
