"""Scripts that a shell reads once: they ask the program itself, by its hidden first argument, what could come next.

Its answer is a line that says how to complete, `words`, `files` or `nothing`, and then a candidate a line. One that
ends with a dot, `[` or `=` is a part of a word, which goes on without a space.
"""

from __future__ import annotations

ASK = "__complete"
"""The hidden first argument; the words so far follow, the last one unfinished."""

_BASH = r"""# Completion of bcp for bash 4.2 and later: eval "$(bcp completion bash)"
_bcp_completion() {
    local line="${COMP_LINE:0:COMP_POINT}" words answer current before
    read -ra words <<< "$line"
    [[ "$line" == *[[:space:]] ]] && words+=("")
    current="${words[-1]}"
    # An opening quote is not a part of the word.
    words[-1]="${current#[\'\"]}"
    current="${words[-1]}"
    mapfile -t answer < <(bcp __complete "${words[@]:1}" 2>/dev/null)
    # bash divides words at these characters, and replaces only what follows them.
    before="${current%"${current##*[:=]}"}"
    COMPREPLY=()
    if [[ "${answer[0]}" == files ]]; then
        compopt -o filenames
        mapfile -t COMPREPLY < <(compgen -f -- "${current#"$before"}")
    elif [[ "${answer[0]}" == words ]]; then
        local word
        for word in "${answer[@]:1}"; do
            COMPREPLY+=("${word#"$before"}")
            [[ "$word" == *[.[=] ]] && compopt -o nospace
        done
    fi
}
complete -F _bcp_completion bcp
"""

_ZSH = r"""#compdef bcp
# Completion of bcp for zsh: eval "$(bcp completion zsh)", after compinit.
_bcp_completion() {
    local -a answer parts whole
    answer=("${(@f)$(bcp __complete "${(@Q)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ "$answer[1]" == files ]]; then
        _files
    elif [[ "$answer[1]" == words ]]; then
        shift answer
        parts=(${(M)answer:#*[.[=]})
        whole=(${answer:#*[.[=]})
        (( $#parts )) && compadd -S '' -- $parts
        (( $#whole )) && compadd -- $whole
    fi
}
compdef _bcp_completion bcp
"""

_FISH = r"""# Completion of bcp for fish: bcp completion fish | source
function __bcp_completion
    set -l current (commandline -ct)
    test (count $current) -eq 0; and set current ''
    set -l before (commandline -opc)
    set -l answer (bcp __complete $before[2..-1] $current 2>/dev/null)
    if test "$answer[1]" = files
        __fish_complete_path $current
    else if test "$answer[1]" = words
        printf '%s\n' $answer[2..-1]
    end
end
complete -c bcp -f -a '(__bcp_completion)'
"""

SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
