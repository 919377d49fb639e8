#!/usr/bin/env bash
# Builds an image, audits it, pushes it to ECR, waits for ECR's scan, and trains a small model on it:
# what github.yml and codebuild.yaml run. Standard output has only the image's name in ECR, by digest.
#
#   examples/aws/release.sh gpu|cpu|vllm|neuron
#
# ROLE: the ARN of the role of jobs. BUCKET: where the job's data and model go. Both are of stack.yaml.
# SMOKE_INSTANCE: the job's instance type (default: ml.m5.xlarge, or ml.g5.xlarge for gpu and vllm;
# none for neuron, whose job is left out unless it is set).
# Cost: the smoke job's instance for some minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

kind=${1:?Give gpu, cpu, vllm or neuron.}
: "${ROLE:?Set ROLE to the ARN of the role of jobs.}" "${BUCKET:?Set BUCKET to the name of a bucket.}"
case $kind in
    cpu) instance=${SMOKE_INSTANCE:-ml.m5.xlarge} ;;
    gpu | vllm) instance=${SMOKE_INSTANCE:-ml.g5.xlarge} ;;
    *) instance=${SMOKE_INSTANCE:-} ;;
esac
tag=ci-$kind-$(git rev-parse --short=12 HEAD)

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
step() { echo "=== $*" >&2; }

step "build and try"
local_image=$(./build_and_push.sh "$kind" --tag "$tag" --no-push)

python3 -m venv "$folder/tools"
"$folder/tools/bin/pip" install --quiet pip-audit==2.10.1 boto3

# A finding in what the locks name ends the release; findings in the base's own packages are only shown.
step "audit the Python packages"
"$folder/tools/bin/pip-audit" --strict --no-deps --disable-pip --requirement container/locks/image.txt >&2
docker run --rm --entrypoint python3 "$local_image" -m pip list --format=freeze >"$folder/installed.txt"
"$folder/tools/bin/pip-audit" --no-deps --disable-pip --requirement "$folder/installed.txt" >&2 ||
    step "the base has the findings above"

step "push"
image=$(./build_and_push.sh "$kind" --tag "$tag")

# Of the operating system's packages.
step "ECR's scan"
aws ecr wait image-scan-complete --repository-name amphora --image-id imageTag="$tag"
critical=$(aws ecr describe-image-scan-findings --repository-name amphora --image-id imageTag="$tag" \
    --query imageScanFindings.findingSeverityCounts.CRITICAL --output text)
if [ "$critical" != None ]; then
    echo "release: $image has $critical critical findings. List them: aws ecr describe-image-scan-findings" \
        "--repository-name amphora --image-id imageTag=$tag" >&2
    exit 1
fi
digest=$(aws ecr describe-images --repository-name amphora --image-ids imageTag="$tag" \
    --query 'imageDetails[0].imageDigest' --output text)
image=${image%:*}@$digest

if [ -n "$instance" ]; then
    step "a small job on $instance"
    {
        echo text,label
        for number in $(seq 20); do printf 'all is well %s,calm\nthe roof burns %s,alarm\n' "$number" "$number"; done
    } >"$folder/rows.csv"
    aws s3 cp --only-show-errors "$folder/rows.csv" "s3://$BUCKET/smoke/train/rows.csv"
    "$folder/tools/bin/python" examples/train_boto3.py --image "$image" --role "$ROLE" --train "s3://$BUCKET/smoke/train/" \
        --output "s3://$BUCKET/smoke/models/" --instance-type "$instance" --max-hours 1 \
        model_name_or_path=google/bert_uncased_L-2_H-128_A-2 max_steps=2 >&2
fi
echo "$image"
