#!/usr/bin/env bash
# Builds one of Amphora's images, tries it, and pushes it to Amazon ECR.
#
#   ./build_and_push.sh gpu|cpu|vllm|neuron [options]
#   ./build_and_push.sh --instance ml.g5.2xlarge [options]
#
#   vllm                 AWS's image of vLLM as the base: decoders on GPUs, and with the Neuron one on Trainium
#
#   --instance I         choose the image for this instance type, and say why
#   --transformers 4|5   gpu and cpu: the major version of transformers; default: 5
#   --stack xla|native   neuron only: torch-xla (trn1, trn1n, inf2; the default), or TorchNeuron (trn2,
#                        trn3), which is added to AWS's vLLM image for Neuron
#   --stand-in           native only: accept a base without torch-neuronx; the image runs on CPUs only
#   --tag T              the image's tag; default: the version and the kind, as in 0.1.0-gpu
#   --region R           of the ECR repository; default: AWS_REGION, or the AWS CLI's own
#   --repository N       default: amphora
#   --base-image I       instead of the default base, for example one pinned by digest
#   --no-push            build and try only; no AWS account is needed for a public base
#
# The last line on standard output is the image_uri for an estimator; everything else goes to standard
# error. DOCKER names the docker client to use (default: docker).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

docker=${DOCKER:-docker}
export DOCKER_BUILDKIT=1

say() { echo "build_and_push: $*" >&2; }
die() {
    say "$1 $2"
    exit 1
}
usage() { sed -n '4,18s/^# \{0,1\}//p' "$0" >&2; }

parse_arguments() {
    kind='' instance='' stand_in='' stack='' transformers='' tag='' region='' repository=amphora base_image='' push=yes
    case ${1:-} in
        gpu | cpu | vllm | neuron) kind=$1; shift ;;
        -h | --help) usage; exit 0 ;;
        --*) ;;
        *) usage; die "'${1:-}' is not a kind of image." "Give gpu, cpu, vllm or neuron, or --instance ml.g5.2xlarge." ;;
    esac
    while [ $# -gt 0 ]; do
        case $1 in
            --no-push) push=no; shift; continue ;;
            --stand-in) stand_in=1; shift; continue ;;
            --instance | --stack | --transformers | --tag | --region | --repository | --base-image)
                [ -n "${2:-}" ] || die "$1 has no value." "Give it after $1, as in the usage." ;;
            *) usage; die "'$1' is not an option." "The options are listed above." ;;
        esac
        case $1 in
            --instance) instance=$2 ;;
            --stack) stack=$2 ;;
            --transformers) transformers=$2 ;;
            --tag) tag=$2 ;;
            --region) region=$2 ;;
            --repository) repository=$2 ;;
            --base-image) base_image=$2 ;;
        esac
        shift 2
    done
    if [ -n "$instance" ]; then choose_for_instance; fi
    case $kind:$stack in
        :*) usage; die "No kind of image is given." "Give gpu, cpu, vllm or neuron, or --instance ml.g5.2xlarge." ;;
        neuron:native | neuron:xla | gpu: | cpu: | vllm:) ;;
        neuron:) stack=xla ;;
        neuron:*) die "--stack '$stack' is unknown." "Give native or xla." ;;
        *) die "--stack goes with neuron only." "Leave it out for $kind." ;;
    esac
    case $kind:$transformers in
        gpu:4 | cpu:4 | gpu:5 | cpu:5 | neuron: | vllm:) ;;
        gpu: | cpu:) transformers=5 ;;
        neuron:* | vllm:*) die "--transformers goes with gpu and cpu only." "Leave it out for $kind." ;;
        *) die "--transformers '$transformers' is unknown." "Give 4 or 5." ;;
    esac
    [ -z "$stand_in" ] || [ "$stack" = native ] || die "--stand-in goes with --stack native only." "Leave it out."
}

# Finds kind, stack and, for vllm on Trainium, base of an instance type; tests/docker/test_scripts.py
# has a row for each family.
choose_for_instance() {
    local name=${instance#ml.} fitting
    local family=${name%%.*}
    [ "$family" != "$name" ] || die "--instance '$instance' is not an instance type." "Give one as ml.g5.2xlarge."
    case $family in
        trn1 | trn1n) fitting=neuron:xla why="Trainium 1 is programmed by torch-xla only" ;;
        inf2) fitting=neuron:xla why="Inferentia 2, which serves and does not train, is programmed by torch-xla only" ;;
        trn2*) fitting=neuron:native why="TorchNeuron is for Trainium 2 (SageMaker has ml.trn2.48xlarge, EC2 also smaller ones)" ;;
        trn3*) fitting=neuron:native why="TorchNeuron is for Trainium 3 (EC2 only: SageMaker does not offer it)" ;;
        inf1) die "Inferentia 1 ($instance) is not supported." "Take inf2, or a CPU as ml.c7i.xlarge." ;;
        p2 | p3 | p3dn | g3 | g3s) die "The GPU of $instance is too old for CUDA 13." \
            "Take ml.g4dn or newer, or build gpu with an older base: --base-image." ;;
        g5g | p6e-gb* | [cmrtx][0-9]*g*) die "$instance has an ARM processor, and the bases are for x86-64." "Take ml.c7i or ml.m7i." ;;
        g4dn | g[5-9]* | gr[6-9]* | p[4-9]*) fitting=gpu: why="it has NVIDIA GPUs" ;;
        [cmrtx][2-9]*) fitting=cpu: why="it has no accelerator" ;;
        *) die "The family of $instance is not known." "Give the kind instead: gpu, cpu, vllm or neuron." ;;
    esac
    case $kind:$fitting in
        vllm:gpu:) ;;
        vllm:neuron:native) base_image=${base_image:-$(default_base native)} ;;
        :* | "${fitting%%:*}":*)
            kind=${fitting%%:*}
            [ "${stack:-${fitting#*:}}" = "${fitting#*:}" ] ||
                die "--stack $stack does not fit $instance: $why." "Leave --stack out."
            stack=${fitting#*:} ;;
        *) die "The image $kind does not fit $instance, since $why." "Leave $kind out." ;;
    esac
}

default_base() { sed -n "s/^$1  *//p" bases.txt; } # gpu, cpu, vllm, xla or native

# Translates the arguments into a Dockerfile, a base and a tag.
resolve() {
    dockerfile=Dockerfile.gpu
    local suffix=$kind
    if [ "$transformers" = 4 ]; then suffix=$kind-transformers4; fi
    if [ "$kind" = neuron ]; then
        dockerfile=Dockerfile.neuron suffix=neuron-$stack
    fi
    base_image=${base_image:-$(default_base "${stack:-$kind}")}
    version=$(sed -n 's/^version = "\(.*\)"/\1/p' container/pyproject.toml)
    tag=${tag:-$version-$suffix}
}

check_docker() {
    command -v "$docker" >/dev/null || die "There is no '$docker'." "Install Docker, or set DOCKER to its client."
    "$docker" info >/dev/null 2>&1 || die "No Docker engine answers." "Start it, or get permission to use it."
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
    command -v aws >/dev/null || die "The registry $1 needs a login, and there is no 'aws'." "Install the AWS CLI."
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

# Finds the digest that the base's tag has now; empty if the base came from no registry.
resolve_base() {
    case $base_image in
        *@sha256:*) base_digest=${base_image##*@}; return ;;
    esac
    "$docker" image inspect "$base_image" >/dev/null 2>&1 || {
        say "pulling $base_image"
        "$docker" pull "$base_image" >&2 ||
            die "The base $base_image cannot be pulled." "Name another one with --base-image${stack:+; github.com/aws-neuron/deep-learning-containers lists those for Neuron}."
    }
    local name=${base_image##*/}
    name=${base_image%"$name"}${name%%:*}
    base_digest=$("$docker" image inspect --format '{{range .RepoDigests}}{{println .}}{{end}}' "$base_image" |
        sed -n "s|^$name@||p")
    say "the base is ${base_digest:-from no registry, and has no digest}"
}

# Empty if this is not a git checkout.
revision() {
    local commit
    commit=$(git rev-parse HEAD 2>/dev/null) || return 0
    git diff --quiet HEAD 2>/dev/null || commit=$commit-modified
    echo "$commit"
}
source_url() { git remote get-url origin 2>/dev/null | sed 's|//[^/@]*@|//|' || true; }

# A base may have labels of these names: each is set, even if empty.
# Not by tee, which would open standard error anew and cut a file that it goes to.
build() {
    local output cause line
    say "building $image from $base_image"
    output=$("$docker" build -f "$dockerfile" --build-arg "BASE_IMAGE=$base_image" --build-arg "STAND_IN=$stand_in" \
        --build-arg "KIND=$kind" --build-arg "STACK=$stack" --build-arg "TRANSFORMERS=$transformers" -t "$image" \
        --label "org.opencontainers.image.version=$version" \
        --label "org.opencontainers.image.revision=$(revision)" \
        --label "org.opencontainers.image.source=$(source_url)" \
        --label "org.opencontainers.image.base.digest=$base_digest" . 2>&1 |
        while IFS= read -r line; do printf '%s\n' "$line" >&2; printf '%s\n' "$line"; done) && return
    # Newer BuildKits repeat the output of the step that failed, then show the Dockerfile.
    cause=$(sed -n '/^ > \[/,/^------/p' <<<"$output" | sed '/^ > \[/d; /^------/d; s/^\(#[0-9]* \)\{0,1\}[0-9.]* //' | tail -n 1)
    cause=${cause:-$(sed -n 's/^#[0-9]* [0-9][0-9.]* //p' <<<"$output" | tail -n 1)}
    die "The build failed." "${cause:-Its last lines above say where.}"
}

# Runs in the image: prints `name=version` of what decides how it behaves.
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

# The versions are known only now. Labels change the configuration of an image, not its layers.
label_versions() {
    local line labels=()
    while IFS= read -r line; do
        if [ -n "$line" ]; then labels+=(--label "amphora.version.$line"); fi
    done < <("$docker" run --rm --entrypoint python3 "$image" -c "$versions")
    "$docker" build -t "$image" "${labels[@]}" - <<<"FROM $image" >&2 ||
        die "$image could not be labelled with its versions." "The last lines above say why."
}

# Runs in the image: checks what must hold for any of them, also without an accelerator.
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
        die "The image is incomplete." "The last line above names what it lacks."
}

push() {
    "$docker" push "$image" >&2 ||
        die "The push of $image failed." "The role needs ecr:PutImage and the layer-upload rights on $repository."
}

parse_arguments "$@"
resolve
if [ -n "$instance" ]; then say "$instance: $kind${stack:+ --stack $stack} from $base_image, since $why"; fi
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
say "done"
echo "$image"
