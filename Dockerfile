# The book and all that it needs, in Linux, for macOS and Windows:
#   docker build -t longhorn-kit .
#   docker run --rm -p 127.0.0.1:8888:8888 -v longhorn-kit:/home/student/longhorn-kit longhorn-kit
# The second command prints the address of JupyterLab. The volume keeps what you write; `docker volume rm longhorn-kit` drops it.
FROM python:3.11-slim

# make for the Makefile's commands, git for the commit in records, g++ for torch.compile
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ git make \
 && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home student
USER student
WORKDIR /home/student/longhorn-kit

# PyTorch without CUDA saves gigabytes
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
COPY --chown=student:student . .
RUN make install

EXPOSE 8888
CMD [".venv/bin/jupyter", "lab", "--ip=0.0.0.0", "--no-browser", "--ServerApp.root_dir=.", "nbs/index.ipynb"]
