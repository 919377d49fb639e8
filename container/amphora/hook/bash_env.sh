# Sourced by bash before it runs a command or a script, where BASH_ENV names this file.
#
# SDK v3's ModelTrainer replaces an image's entry point by `/bin/bash -c ".../sm_drivers/sm_train.sh"`.
# As PID 1 bash ignores SIGTERM, and that script breaks on quotes in values: so amphora takes the
# command over. Every other use of bash goes on as if this file were not there.
if [[ $$ -eq 1 && ${BASH_EXECUTION_STRING-} == */sm_drivers/sm_train.sh ]] &&
    command -v amphora >/dev/null; then
    unset BASH_ENV
    exec amphora train --sdk-command "$BASH_EXECUTION_STRING"
fi
unset BASH_ENV
