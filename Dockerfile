# Evolver on a CPU. `docker build -t evolver .`, then for example
# `docker run --rm -v "$PWD/runs:/runs" evolver train --config=configs/quickstart.py --workdir=/runs/quickstart`
FROM python:3.11-slim
COPY . /source
RUN python -m pip install --no-cache-dir /source && rm -r /source
ENV JAX_PLATFORMS=cpu
ENTRYPOINT ["evolver"]
CMD ["--help"]
