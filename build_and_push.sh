#!/usr/bin/env bash
# Builds one of Amphora's images, tries it, and pushes it to Amazon ECR.
#
#   ./build_and_push.sh gpu|cpu|vllm|neuron [options]
#
#   vllm                 AWS's image of vLLM as the base: decoders on GPUs, and with the Neuron one on Trainium
#
#   --transformers 4|5   gpu and cpu: the major version of transformers; default: 5
#   --stack native|xla   neuron only: TorchNeuron (trn2, trn3; the default), which needs --base-image,
#                        or the legacy stack of trn1, torch-xla
#   --tag T              the image's tag; default: the version and the kind, as in 0.1.0-gpu
#   --region R           of the ECR repository; default: AWS_REGION, or the AWS CLI's own
#   --repository N       default: amphora
#   --base-image I       instead of the Dockerfile's base, for example one pinned by digest
#   --attest KEY         sign what was pushed with this key of cosign's (a file, awskms:///..., or
#                        keyless), and attest its bill of materials and its provenance
#   --no-push            build and try only; no AWS account is needed for a public base
#
# The last line on standard output is the image_uri for an estimator; all else goes to standard
# error. DOCKER names the docker client to use (default: docker), COSIGN_OPTIONS what else cosign
# is told each time, such as --tlog-upload=false.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

docker=${DOCKER:-docker}
# vLLM 0.27, Python 3.12, CUDA 13.0 (August 2026).
vllm_base=public.ecr.aws/deep-learning-containers/vllm:server-sagemaker-cuda-v2.3
# The last training image with torch-xla. Hugging Face's, with optimum-neuron, is older: docs/TRAINIUM.md.
xla_base=public.ecr.aws/neuron/pytorch-training-neuronx:2.9.0-neuronx-py312-sdk2.30.0-ubuntu24.04
export DOCKER_BUILDKIT=1

say() { echo "build_and_push: $*" >&2; }
die() {
    say "$1 $2"
    exit 1
}
usage() { sed -n '4,18s/^# \{0,1\}//p' "$0" >&2; }

parse_arguments() {
    kind=${1:-}
    stack='' transformers='' tag='' region='' repository=amphora base_image='' key='' push=yes
    case $kind in
        gpu | cpu | vllm | neuron) shift ;;
        -h | --help) usage; exit 0 ;;
        *) usage; die "'$kind' is no kind of image." "Say gpu, cpu, vllm or neuron." ;;
    esac
    while [ $# -gt 0 ]; do
        case $1 in
            --no-push) push=no; shift; continue ;;
            --stack | --transformers | --tag | --region | --repository | --base-image | --attest)
                [ -n "${2:-}" ] || die "$1 has no value." "Write it after $1, as in the usage above the script." ;;
            *) usage; die "'$1' is no option." "The options are listed above." ;;
        esac
        case $1 in
            --stack) stack=$2 ;;
            --transformers) transformers=$2 ;;
            --tag) tag=$2 ;;
            --region) region=$2 ;;
            --repository) repository=$2 ;;
            --base-image) base_image=$2 ;;
            --attest) key=$2 ;;
        esac
        shift 2
    done
    case $kind:$stack in
        neuron:native | neuron:xla | gpu: | cpu: | vllm:) ;;
        neuron:) stack=native ;;
        neuron:*) die "--stack '$stack' is unknown." "Say native or xla." ;;
        *) die "--stack goes with neuron only." "Leave it out for $kind." ;;
    esac
    case $kind:$transformers in
        gpu:4 | cpu:4 | gpu:5 | cpu:5 | neuron: | vllm:) ;;
        gpu: | cpu:) transformers=5 ;;
        neuron:* | vllm:*) die "--transformers goes with gpu and cpu only." "Leave it out for $kind." ;;
        *) die "--transformers '$transformers' is unknown." "Say 4 or 5." ;;
    esac
}

# What the arguments mean: a Dockerfile, a base and a tag.
resolve() {
    dockerfile=Dockerfile.gpu
    local suffix=$kind
    if [ "$transformers" = 4 ]; then suffix=$kind-transformers4; fi
    if [ "$kind" = neuron ]; then
        dockerfile=Dockerfile.neuron suffix=neuron-$stack
        if [ -z "$base_image" ] && [ "$stack" = native ]; then
            die "The native stack has no default base: the tag of AWS's TorchNeuron training image (Neuron 2.33) was not known." \
                "Name the image with --base-image (docs/TRAINIUM.md), or build --stack xla for trn1."
        fi
        base_image=${base_image:-$xla_base}
    fi
    if [ "$kind" = vllm ]; then base_image=${base_image:-$vllm_base}; fi
    if [ -z "$base_image" ]; then
        base_image=$(sed -n 's/^ARG BASE_IMAGE=//p' "$dockerfile")
        if [ "$kind" = cpu ]; then base_image=${base_image/-cu[0-9]*-amzn/-cpu-amzn}; fi
    fi
    version=$(sed -n 's/^version = "\(.*\)"/\1/p' container/pyproject.toml)
    tag=${tag:-$version-$suffix}
}

# What is attested must be what was built: a commit that is not all of it would be a false statement.
check_cosign() {
    [ "$push" = yes ] || die "--attest signs what lies in a registry." "Leave out --no-push, or --attest."
    command -v cosign >/dev/null || die "There is no 'cosign'." "Install it, or leave out --attest."
    [ -n "$(revision)" ] || die "This is no git checkout, so that nothing tells what was built." "Leave out --attest."
    [ -z "$(git status --porcelain)" ] || die "The checkout has changes, which no commit names." "Commit them, or leave out --attest."
}

check_docker() {
    command -v "$docker" >/dev/null || die "There is no '$docker'." "Install Docker, or name its client in DOCKER."
    "$docker" info >/dev/null 2>&1 || die "No Docker engine answers." "Start it, or ask for the right to use it."
    local major
    major=$("$docker" --version | sed -n 's/^Docker version \([0-9]*\).*/\1/p')
    if [ "${major:-99}" -ge 23 ] && ! "$docker" buildx version >/dev/null 2>&1; then
        die "This docker client cannot build with BuildKit." "Install its plugin docker-buildx."
    fi
}

check_aws() {
    command -v aws >/dev/null || die "There is no 'aws'." "Install the AWS CLI, or build only, with --no-push."
    region=${region:-${AWS_REGION:-${AWS_DEFAULT_REGION:-$(aws configure get region || true)}}}
    [ -n "$region" ] || die "No region is set." "Give --region, as in --region us-east-1."
    account=$(aws sts get-caller-identity --region "$region" --query Account --output text) ||
        die "AWS does not accept the credentials." "Run 'aws configure' or 'aws sso login', or build only, with --no-push."
    registry=$account.dkr.ecr.$region.$(domain "$region")
}

domain() { case $1 in cn-*) echo amazonaws.com.cn ;; *) echo amazonaws.com ;; esac; }

log_in() { # registry: its name holds the region
    local of=${1#*.dkr.ecr.}
    command -v aws >/dev/null || die "The registry $1 wants a login, and there is no 'aws'." "Install the AWS CLI."
    say "logging in to $1"
    aws ecr get-login-password --region "${of%%.*}" | "$docker" login --username AWS --password-stdin "$1" >&2 ||
        die "The login to $1 failed." "The role needs ecr:GetAuthorizationToken, and for pulling a base ecr:BatchGetImage."
}

log_in_for_base() {
    case $base_image in
        *.dkr.ecr.*.amazonaws.com*/*) log_in "${base_image%%/*}" ;;
    esac
}

ensure_repository() {
    aws ecr describe-repositories --region "$region" --repository-names "$repository" >/dev/null 2>&1 && return
    say "creating the repository $repository in $region"
    aws ecr create-repository --region "$region" --repository-name "$repository" >/dev/null ||
        die "The repository $repository could not be created in $region." \
            "Create it, or use a role with ecr:CreateRepository."
}

# The digest of what the base's name stands for now; empty where the base came from no registry.
resolve_base() {
    case $base_image in
        *@sha256:*) base_digest=${base_image##*@}; return ;;
    esac
    "$docker" image inspect "$base_image" >/dev/null 2>&1 || {
        say "pulling $base_image"
        "$docker" pull "$base_image" >&2 ||
            die "The base $base_image cannot be pulled." "Name another one with --base-image."
    }
    local name=${base_image##*/}
    name=${base_image%"$name"}${name%%:*}
    base_digest=$("$docker" image inspect --format '{{range .RepoDigests}}{{println .}}{{end}}' "$base_image" |
        sed -n "s|^$name@||p")
    say "the base is ${base_digest:-of no registry, so that it has no digest}"
}

# Empty where this is no git checkout.
revision() {
    local commit
    commit=$(git rev-parse HEAD 2>/dev/null) || return 0
    git diff --quiet HEAD 2>/dev/null || commit=$commit-modified
    echo "$commit"
}
source_url() { git remote get-url origin 2>/dev/null | sed 's|//[^/@]*@|//|' || true; }

# A base may have labels of these names: each is set, if to nothing.
build() {
    say "building $image from $base_image"
    "$docker" build -f "$dockerfile" --build-arg "BASE_IMAGE=$base_image" \
        --build-arg "KIND=$kind" --build-arg "STACK=$stack" --build-arg "TRANSFORMERS=$transformers" -t "$image" \
        --label "org.opencontainers.image.version=$version" \
        --label "org.opencontainers.image.revision=$(revision)" \
        --label "org.opencontainers.image.source=$(source_url)" \
        --label "org.opencontainers.image.base.digest=$base_digest" . >&2 ||
        die "The build failed." "Its last lines above say where."
}

# Runs in the image: `name=version` of what decides how it behaves.
versions='
import platform
from importlib.metadata import PackageNotFoundError, version
print(f"python={platform.python_version()}")
for name in ("amphora", "torch", "torch-xla", "torch-neuronx", "neuronx-cc", "vllm", "transformers", "accelerate", "datasets"):
    try:
        print(f"{name}={version(name)}")
    except PackageNotFoundError:
        pass
'

# What is installed is known only now: labels change an image's configuration, none of its layers.
label_versions() {
    local line labels=()
    while IFS= read -r line; do
        if [ -n "$line" ]; then labels+=(--label "amphora.version.$line"); fi
    done < <("$docker" run --rm --entrypoint python3 "$image" -c "$versions")
    "$docker" build -t "$image" "${labels[@]}" - <<<"FROM $image" >&2 ||
        die "$image could not be labelled with its versions." "The last lines above say why."
}

# Runs in the image. What must hold of any of them, on a machine without its accelerator.
smoke_test='
import importlib, os, shutil
for name in ("torch", "transformers", "datasets", "evaluate", "boto3", "sagemaker_training", "pytest"):
    importlib.import_module(name)
for tool in ("amphora", "python3", "pip", "bash", "torchrun"):
    assert shutil.which(tool), f"{tool} is not on PATH"
code = os.environ["AMPHORA_CODE_DIR"]
for name in ("train.py", "inference.py"):
    assert os.path.isfile(os.path.join(code, name)), f"{name} is not in {code}"
ours = [file for _, _, files in os.walk("/opt/ml") for file in files]
assert not ours, f"files under /opt/ml: {ours}"
'

try_image() {
    say "trying $image"
    local entry
    entry=$("$docker" inspect -f '{{json .Config.Entrypoint}} {{json .Config.Cmd}}' "$image")
    [ "$entry" = '["amphora"] ["train"]' ] ||
        die "The image starts with $entry." "Its Dockerfile must end in ENTRYPOINT [\"amphora\"] and CMD [\"train\"]."
    "$docker" run --rm "$image" --version >&2 ||
        die "'amphora --version' fails in $image." "Look with: $docker run --rm -it --entrypoint bash $image"
    "$docker" run --rm --entrypoint python3 "$image" -c "$smoke_test" >&2 ||
        die "The image is not complete." "The last line above says what it lacks."
}

# Runs in the image: SLSA's provenance, version 1. Arguments: kind, stack, dockerfile, base, its
# digest, remote, commit, when it began, when it ended, transformers.
provenance='
import json, sys
kind, stack, dockerfile, base, base_digest, source, commit, began, ended, transformers = sys.argv[1:]
materials = [{"uri": f"git+{source}", "digest": {"gitCommit": commit}}, {"uri": f"docker://{base}"}]
if base_digest:
    materials[1]["digest"] = dict([base_digest.split(":", 1)])
asked = {"kind": kind, "stack": stack, "dockerfile": dockerfile, "base": base,
         "transformers": transformers}
print(json.dumps({
    "buildDefinition": {
        "buildType": "urn:amphora:build_and_push:1",
        "externalParameters": {name: value for name, value in asked.items() if value},
        "resolvedDependencies": materials,
    },
    "runDetails": {
        "builder": {"id": "urn:amphora:build_and_push"},
        "metadata": {"startedOn": began, "finishedOn": ended},
    },
}))
'

now() { date -u +%Y-%m-%dT%H:%M:%SZ; }

# By its digest, since a tag may name another image tomorrow.
attest() {
    local digest scratch options=(--yes)
    digest=$("$docker" image inspect --format '{{range .RepoDigests}}{{println .}}{{end}}' "$image" |
        sed -n "s|^$registry/$repository@||p")
    [ -n "$digest" ] || die "The registry gave $image no digest." "Look with: $docker image inspect $image"
    local subject=$registry/$repository@$digest
    if [ "$key" != keyless ]; then options+=(--key "$key"); fi
    # shellcheck disable=SC2206 # one word for each option
    options+=(${COSIGN_OPTIONS-})
    scratch=$(mktemp -d)
    # shellcheck disable=SC2064 # the folder's name of now
    trap "rm -rf '$scratch'" EXIT
    "$docker" run --rm --entrypoint cat "$image" /opt/amphora/sbom.cdx.json >"$scratch/sbom" ||
        die "$image has no bill of materials." "It lies at /opt/amphora/sbom.cdx.json in an image of this script."
    "$docker" run --rm --entrypoint python3 "$image" -c "$provenance" "$kind" "$stack" "$dockerfile" \
        "$base_image" "$base_digest" "$(source_url)" "$(revision)" "$began" "$(now)" "$transformers" \
        >"$scratch/provenance" ||
        die "The provenance of $image could not be written." "The last lines above say why."
    say "signing $subject, attesting what is in it and where it comes from"
    { cosign sign "${options[@]}" "$subject" &&
        cosign attest "${options[@]}" --type cyclonedx --predicate "$scratch/sbom" "$subject" &&
        cosign attest "${options[@]}" --type slsaprovenance1 --predicate "$scratch/provenance" "$subject"; } >&2 ||
        die "$image is pushed, but not attested." "The last line above is cosign's. Then call this again; the build is cached."
}

push() {
    "$docker" push "$image" >&2 ||
        die "The push of $image failed." "The role needs ecr:PutImage and the layer-upload rights on $repository."
}

parse_arguments "$@"
resolve
began=''
if [ -n "$key" ]; then
    check_cosign
    began=$(now)
fi
check_docker
image=$repository:$tag
if [ "$push" = yes ]; then
    check_aws
    image=$registry/$image
    log_in "$registry"
    ensure_repository
fi
log_in_for_base
resolve_base
build
try_image
label_versions
if [ "$push" = yes ]; then push; fi
if [ -n "$key" ]; then attest; fi
say "done"
echo "$image"
