# Completes groups, their choices and settings of hvtrain in bash. Made by: python -m hvtrain completion bash
# shellcheck shell=bash disable=SC2190
declare -gA _hvtrain_values=(
@VALUES@
  # Arguments of commands.
  [run]=''
  [checkpoint]='best last'
  [split]='train validation test'
  [input]=''
  [format]='keras savedmodel onnx tflite hf'
  [repo]=''
  [prompt]=''
  [trials]=''
)
# The choices or the commands to which a name belongs, if not all have it.
declare -gA _hvtrain_owners=(
@OWNERS@
  [run]='evaluate predict export generate'
  [checkpoint]='evaluate predict export generate'
  [split]='evaluate predict'
  [input]=predict
  [format]=export
  [repo]=export
  [prompt]=generate
  [sweep]=sweep
  [trials]=sweep
  [cluster]=launch
)
# 1: the line of the command may have settings of a run.
declare -gA _hvtrain_commands=(
@COMMANDS@
)

# The choice of each group that a line does not choose.
declare -gA _hvtrain_defaults=(
@DEFAULTS@
)

# The words of a line decide: which command of hvtrain it has, and which folder of --config-dir.
_hvtrain() {
  local line="${COMP_LINE:0:COMP_POINT}" start="" command="" folder="" word index
  local -a words=()
  COMPREPLY=()
  read -ra words <<<"$line"
  [[ $line != *[[:space:]] ]] || words+=("")
  word="${words[-1]}"
  for ((index = 0; index < ${#words[@]} - 1; index++)); do
    case "${words[index]}" in
      hvtrain | */hvtrain)
        [[ $start ]] || start=$((index + 1))
        ;;
      --config-dir | -cd) folder="${words[index + 1]}" ;;
      --config-dir=*) folder="${words[index]#*=}" ;;
    esac
  done
  if [[ ${words[-2]:-} == -m ]]; then
    mapfile -t COMPREPLY < <(compgen -W hvtrain -- "$word")
    return
  fi
  [[ $start ]] || return
  # The first word may be a command. Settings alone train.
  if ((start < ${#words[@]} - 1)) && [[ ${words[start]} =~ ^[A-Za-z_]+$ ]]; then
    command="${words[start]}"
    [[ ${_hvtrain_commands[$command]:-0} == 1 ]] || return
  fi
  [[ ${words[-2]} != -cd && ${words[-2]} != --config-dir ]] || return
  case "$word" in
    -*) mapfile -t COMPREPLY < <(compgen -W "--config-dir --help" -- "$word") ;;
    *=*) _hvtrain_value "$word" "$folder" ;;
    *) _hvtrain_name "$word" "$command" $((start == ${#words[@]} - 1)) " ${words[*]:start} " ;;
  esac
}

# model= or model.units= after "mod"; one part of a dotted name at a time. A line that begins here may have a command.
_hvtrain_name() { # WORD COMMAND IS_FIRST LINE
  local sign="" word="$1" name rest owners
  local -a names=("${!_hvtrain_values[@]}")
  [[ $word != [+~]* ]] || sign="${word:0:1}" word="${word:1}"
  for name in "${names[@]}"; do
    [[ $name == "$word"* ]] || continue
    owners="${_hvtrain_owners[$name]:-}"
    [[ $name != cluster.* ]] || owners=launch
    _hvtrain_is_of "$owners" "$2" "$4" || continue
    rest="${name#"$word"}="
    [[ $rest != *.* ]] || rest="${rest%%.*}."
    COMPREPLY+=("$sign$word$rest")
  done
  if (($3)) && [[ ! $sign ]]; then
    for name in "${!_hvtrain_commands[@]}"; do
      [[ $name != "$word"* ]] || COMPREPLY+=("$name ")
    done
  fi
  if [[ $word && " ${_hvtrain_owners[run]} report " == *" $2 "* ]]; then
    mapfile -t -O ${#COMPREPLY[@]} COMPREPLY < <(compgen -d -S / -- "$word")
  fi
  mapfile -t COMPREPLY < <(printf '%s\n' "${COMPREPLY[@]}" | sort -u)
  compopt -o nospace
}

# A command has its own arguments; a group that is chosen on the line has the settings of that choice.
_hvtrain_is_of() { # OWNERS COMMAND LINE
  local owner group default
  [[ $1 ]] || return 0
  [[ " $1 " != *" $2 "* || ! $2 ]] || return 0
  for owner in $1; do
    [[ $owner == *=* ]] || return 1
    [[ $3 != *" $owner "* ]] || return 0
    group="${owner%%=*}"
  done
  # An experiment or a run may have chosen, and several choices stand in brackets.
  [[ $3 != *" experiment="* && $3 != *" --config-dir"* && " ${_hvtrain_owners[run]} " != *" $2 "* ]] || return 0
  [[ $3 != *" $group="[[:alpha:]]* ]] || return 1
  default="${_hvtrain_defaults[$group]:-}"
  [[ ! $default || " $1 " == *" $group=$default "* ]]
}

# What may stand after model= or, in a list, after augment=[random_flip,
_hvtrain_value() { # WORD FOLDER
  local name="${1%%=*}" value="${1#*=}" before choices file
  name="${name#+}"
  before="${value%"${value##*[\[,]}"}"
  choices="${_hvtrain_values[$name]:-}"
  for file in "$2/$name"/*.yaml; do
    [[ ! $2 || ! -e $file ]] || choices+=" $(basename "$file" .yaml)"
  done
  # Bash replaces what stands after the = alone, unless the user has taken it from the characters that break words.
  [[ $COMP_WORDBREAKS == *=* ]] || before="${1%%=*}=$before"
  mapfile -t COMPREPLY < <(compgen -W "$choices" -P "$before" -- "${value##*[\[,]}")
  [[ $value != *\[* ]] || compopt -o nospace
}

# A line that begins with one of these may contain settings of hvtrain. Without a match the shell completes file names.
complete -o bashdefault -o default -F _hvtrain hvtrain python python3 horovodrun mpirun ./scripts/run
