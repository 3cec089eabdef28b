{{- /* Several models. A template of one model's objects takes a root whose values `model`, `prefill`, `decode` and `autoscaling` are
       that model's; `key` names it there, and is empty for the first one. */ -}}

{{- /* Set into.roots: the roots of all models, the first before the others. Takes root, into. */ -}}
{{- define "baton.modelRoots" -}}
{{- $root := .root -}}
{{- $roots := list $root -}}
{{- range $own := $root.Values.models }}
{{- $values := deepCopy (omit $root.Values "models") }}
{{- /* What a model has of its own (source, hash, names, lengths, adapters, draft model) is not inherited. */}}
{{- $model := dict "servedName" $own.name "maxModelLen" 0 "huggingFace" (dict "sha256" "") }}
{{- $_ := set $model "adapters" (dict "slots" 0 "maxRank" 16 "source" "" "load" dict) }}
{{- $_ := set $values "model" (mergeOverwrite (omit (deepCopy $values.model) "adapters") $model (deepCopy ($own.model | default dict))) }}
{{- if $values.decode.draftModel }}
{{- $_ := set $values.decode "draftModel" "" }}
{{- $engine := $values.decode.config.engine | default dict }}
{{- if kindIs "map" $engine }}{{ $_ := set $values.decode.config "engine" (omit $engine "draft_kv_memory_bytes" "speculative_tokens") }}{{ end }}
{{- end }}
{{- range $part := list "prefill" "decode" "autoscaling" }}
{{- $_ := set $values $part (mergeOverwrite (index $values $part) (deepCopy (index $own $part | default dict))) }}
{{- end }}
{{- $roots = append $roots (dict "Values" $values "key" $own.name "own" $own "Release" $root.Release "Chart" $root.Chart "Files" $root.Files "Capabilities" $root.Capabilities "Template" $root.Template) }}
{{- end }}
{{- $_ := set .into "roots" $roots -}}
{{- end -}}

{{- /* Component of a model's pods. Takes root, role. */ -}}
{{- define "baton.component" -}}{{ .role }}{{ with .root.key }}-{{ . }}{{ end }}{{- end -}}

{{- /* Components of all models' workers, as a JSON list. */ -}}
{{- define "baton.workerComponents" -}}
{{- $all := dict -}}
{{- include "baton.modelRoots" (dict "root" . "into" $all) -}}
{{- $found := list -}}
{{- range $model := $all.roots }}
{{- range $role := list "prefill" "decode" }}{{ $found = append $found (include "baton.component" (dict "root" $model "role" $role)) }}{{ end }}
{{- end }}
{{- toJson $found -}}
{{- end -}}

{{- /* Name of the volume with a model's directory, which is mounted at / followed by it. */ -}}
{{- define "baton.modelsVolume" -}}models{{ with .key }}-{{ . }}{{ end }}{{- end -}}

{{- /* Further models as the router's configuration lists them. */ -}}
{{- define "baton.routerModels" -}}
{{- $all := dict -}}
{{- include "baton.modelRoots" (dict "root" . "into" $all) -}}
{{- $found := list -}}
{{- range $one := rest $all.roots }}
{{- $entry := dict "name" $one.key "model" (include "baton.modelPath" $one) "aliases" ($one.own.aliases | default list)
    "max_model_len" (int $one.Values.model.maxModelLen) "max_concurrent_requests" (int ($one.own.maxConcurrentRequests | default 0)) }}
{{- /* Only where given: a router of an earlier image refuses them. */}}
{{- with $one.own.toolParser }}{{- $_ := set $entry "tool_parser" . }}{{- end }}
{{- with $one.own.reasoningParser }}{{- $_ := set $entry "reasoning_parser" . }}{{- end }}
{{- $found = append $found $entry }}
{{- end }}
{{- toJson $found -}}
{{- end -}}

{{- define "baton.checkModels" -}}
{{- $all := dict -}}
{{- include "baton.modelRoots" (dict "root" . "into" $all) -}}
{{- $names := list (include "baton.servedName" .) -}}
{{- range $alias := .Values.router.config.model_aliases | default list }}{{ $names = append $names $alias }}{{ end }}
{{- $least := 0 }}
{{- range $one := $all.roots }}
{{- range $role := list "prefill" "decode" }}
{{- $least = add $least (mul (max 1 (int (index $one.Values.autoscaling $role).minReplicas)) (max 1 (int (index $one.Values $role).gpus))) }}
{{- end }}
{{- end }}
{{- range $one := rest $all.roots }}
{{- $where := printf "models[%s]" $one.key }}
{{- range $name := prepend ($one.own.aliases | default list) $one.key }}
{{- if has $name $names }}
{{- fail (printf "%s: the name %s is another model's too: every name and alias leads to one model, change one" $where $name) }}
{{- end }}
{{- $names = append $names $name }}
{{- end }}
{{- /* Components and NetworkPolicies of other pods are named so: prefill-ranks, prefill-kv, prefill-NAME-kv. */}}
{{- if or (eq $one.key "ranks") (eq $one.key "kv") (hasSuffix "-kv" $one.key) }}
{{- fail (printf "%s: names ranks, kv and *-kv are of the chart's own objects: choose another" $where) }}
{{- end }}
{{- /* prefill-set is the first model's LeaderWorkerSet, and prefill-groups its NetworkPolicy. */}}
{{- if and (eq $.Values.multiNode.by "leaderWorkerSet") (has $one.key (list "set" "groups")) }}
{{- fail (printf "%s: with multiNode.by leaderWorkerSet the names set and groups are of the chart's own objects: choose another" $where) }}
{{- end }}
{{- /* Pods of a StatefulSet have a label with its name and a hash of 11 characters, of 63 at most. */}}
{{- $longest := printf "%s-prefill-%s" (include "baton.base" $one) $one.key }}
{{- if gt (len $longest) 52 }}
{{- fail (printf "%s: %s is longer than the 52 characters of a StatefulSet's name: shorten the name, or set fullnameOverride" $where $longest) }}
{{- end }}
{{- if not (include "baton.workersAreSets" $) }}
{{- fail (printf "%s needs ray.mode embedded or none: one Serve application holds the workers of one model" $where) }}
{{- end }}
{{- if not (($one.own.model | default dict).source) }}
{{- fail (printf "%s.model.source is empty: name the model's directory, as model.source does" $where) }}
{{- end }}
{{- range $field := list "servedName" "pageSize" }}
{{- if hasKey $one.own.model $field }}
{{- fail (printf "%s.model.%s can't be set: use %s" $where $field (ternary "the entry's name, which is the served name" "model.pageSize, which is one for all models" (eq $field "servedName"))) }}
{{- end }}
{{- end }}
{{- range $field, $value := $one.own.autoscaling }}
{{- if not (has $field (list "ttftSeconds" "itlSeconds" "prefill" "decode")) }}
{{- fail (printf "%s.autoscaling.%s is shared by all models: set autoscaling.%s" $where $field $field) }}
{{- end }}
{{- end }}
{{- if or (gt (int $one.Values.prefill.nodes) 1) (gt (int $one.Values.decode.nodes) 1) }}
{{- fail (printf "%s: workers of several pods (nodes above 1) are for the first model only: give each of this one's a pod with all of its GPUs" $where) }}
{{- end }}
{{- range $role := list "prefill" "decode" }}
{{- if and ($.Values.autoscaling.enabled) (not (kindIs "invalid" (index $one.Values $role).replicas)) }}
{{- fail (printf "%s: autoscaling.enabled and %s.replicas both set the pool's size: remove the latter, and set %s.autoscaling.%s.minReplicas" $where $role $where $role) }}
{{- end }}
{{- include "baton.checkPool" (dict "root" $one "role" $role "pool" (index $one.Values $role)) }}
{{- end }}
{{- include "baton.checkLabels" (dict "root" $one) }}
{{- include "baton.checkAdapters" (dict "root" $one "where" (printf "%s.model.adapters" $where)) }}
{{- include "baton.checkLayouts" $one }}
{{- include "baton.checkConfigs" $one }}
{{- include "baton.checkRouter" $one }}
{{- end }}
{{- /* router/request/served_model.py: requests would reach the model, or the adapter of the model before. */}}
{{- range $one := $all.roots }}
{{- $where := ternary (printf "models[%s].model.adapters.load" $one.key) "model.adapters.load" (hasKey $one "key") }}
{{- range $name, $directory := $one.Values.model.adapters.load }}
{{- if has $name $names }}
{{- fail (printf "%s: the name %s is another adapter's, a model's or an alias too: every name leads to one of them, change one" $where $name) }}
{{- end }}
{{- $names = append $names $name }}
{{- end }}
{{- end }}
{{- if and .Values.models .Values.autoscaling.enabled (gt (int $least) (int .Values.autoscaling.gpuBudget)) }}
{{- fail (printf "autoscaling.gpuBudget = %d, and the smallest pools of all models need %d: raise it, or lower minReplicas" (int .Values.autoscaling.gpuBudget) (int $least)) }}
{{- end }}
{{- end -}}
