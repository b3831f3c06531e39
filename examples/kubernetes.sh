#!/usr/bin/env bash
# Writes the manifests of a fleet on GPUs: a router, prefill workers, a domain and its ffn worker.
set -euo pipefail
folder=${1:-build/kubernetes}
"${PYTHON:-python}" -m jaxserve.launch --target kubernetes --config demo-fleet-afd \
  --hardware h100 --without-keys --write "$folder"
ls "$folder"
echo "kubectl apply --filename $folder"
