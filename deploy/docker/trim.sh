#!/bin/sh
# Removes from the environment what no container of the cluster runs: about 110 MB.
set -eu
packages=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# Only `baton doctor` and a start on Kubernetes import this package: they compile what they need of it.
find "$packages/kubernetes" -name __pycache__ -prune -exec rm -r {} +
find "$packages/numpy" -name tests -prune -exec rm -r {} +
# The image has the model once.
rm -r "$packages/baton/demo_model"
ln -s /opt/baton/demo-model "$packages/baton/demo_model"
python -m pip uninstall -q -y setuptools pip
