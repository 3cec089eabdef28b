{{- /* What Kubernetes or a process would refuse only after the install: names, labels, ports, amounts. */ -}}

{{- define "baton.checkNames" -}}
{{- $base := include "baton.base" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $base) }}
{{- fail (printf "%s, made from the release's name, can't begin names of Services, which have small letters, digits and - only, and a letter first: set fullnameOverride, or install under another name" $base) }}
{{- end }}
{{- if hasPrefix "/" (include "baton.registry" .) }}
{{- fail "image.registry and global.imageRegistry are both empty: set one to the registry that holds the images" }}
{{- end }}
{{- range $role := list "prefill" "decode" }}
{{- $pool := index $.Values $role }}
{{- $name := printf "%s-%s-ranks" $base $role }}
{{- /* Pods of a StatefulSet have a label with its name and a hash of 11 characters, of 63 at most. */}}
{{- if and (gt (int $pool.nodes) 1) (not (include "baton.inGroups" (dict "root" $ "pool" $pool))) (gt (len $name) 52) }}
{{- fail (printf "%s is longer than the 52 characters of a StatefulSet's name: set fullnameOverride to a shorter one" $name) }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* Labels and annotations of pods by which the chart itself finds and rolls them. Takes root. */ -}}
{{- define "baton.checkLabels" -}}
{{- $selector := list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" -}}
{{- $own := concat $selector (list "app.kubernetes.io/version" "app.kubernetes.io/managed-by" "helm.sh/chart") -}}
{{- $values := .root.Values -}}
{{- $pods := dict "prefill.pod" $values.prefill.pod "decode.pod" $values.decode.pod }}
{{- if not .root.key }}
{{- $_ := merge $pods (dict "router.pod" $values.router.pod "ray.head.pod" $values.ray.head.pod "redis.pod" $values.redis.pod "autoscaling.pod" $values.autoscaling.pod "doctor.pod" $values.doctor.pod "tests.pod" $values.tests.pod) }}
{{- range $name := keys $values.commonLabels | sortAlpha }}
{{- if has $name $own }}
{{- fail (printf "commonLabels: %s is a label of the chart's own: remove it" $name) }}
{{- end }}
{{- end }}
{{- if hasKey $values.commonAnnotations "checksum/config" }}
{{- fail "commonAnnotations: checksum/config is the chart's own, which rolls pods when their settings change: remove it" }}
{{- end }}
{{- end }}
{{- range $where, $pod := $pods }}
{{- range $name := keys $pod.labels | sortAlpha }}
{{- if has $name $selector }}
{{- fail (printf "%s.labels: %s is the label by which Services and policies choose pods: remove it" $where $name) }}
{{- end }}
{{- end }}
{{- if hasKey $pod.annotations "checksum/config" }}
{{- fail (printf "%s.annotations: checksum/config is the chart's own, which rolls pods when their settings change: remove it" $where) }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* Ports of Ray's processes that are not chosen by the system, by their values' names; as JSON. */ -}}
{{- define "baton.fixedRayPorts" -}}
{{- $fixed := dict -}}
{{- range $name, $port := omit .Values.ray.ports "firstWorker" "lastWorker" }}
{{- if int $port }}{{ $_ := set $fixed (printf "ray.ports.%s" $name) (int $port) }}{{ end }}
{{- end }}
{{- toJson $fixed -}}
{{- end -}}

{{- /* Processes of one pod, each of which needs its port for itself. Takes ports (name → port), ranges (name → first, last). */ -}}
{{- define "baton.checkPodPorts" -}}
{{- $ports := .ports -}}
{{- $ranges := .ranges -}}
{{- range $name, $port := $ports }}
{{- range $other, $same := $ports }}
{{- if and (lt $name $other) (eq (int $port) (int $same)) }}
{{- fail (printf "%s and %s are both %d, in one pod: change one" $name $other (int $port)) }}
{{- end }}
{{- end }}
{{- range $range, $ends := $ranges }}
{{- if and (ge (int $port) (int $ends.first)) (le (int $port) (int $ends.last)) }}
{{- fail (printf "%s = %d is within %s (%d to %d), which other listeners of its pod take: change one" $name (int $port) $range (int $ends.first) (int $ends.last)) }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "baton.rayWorkerPorts" -}}
{{- $ports := .Values.ray.ports -}}
{{- $ranges := dict -}}
{{- if int $ports.firstWorker }}{{ $_ := set $ranges "ray.ports.firstWorker to lastWorker" (dict "first" (int $ports.firstWorker) "last" (int $ports.lastWorker)) }}{{ end }}
{{- toJson $ranges -}}
{{- end -}}

{{- define "baton.checkRayPorts" -}}
{{- $ports := .Values.ray.ports -}}
{{- if and (int $ports.firstWorker) (lt (int $ports.lastWorker) (int $ports.firstWorker)) }}
{{- fail (printf "ray.ports.lastWorker = %d is below firstWorker = %d: raise it, or set firstWorker to 0 to let the system choose" (int $ports.lastWorker) (int $ports.firstWorker)) }}
{{- end }}
{{- include "baton.checkPodPorts" (dict "ports" (include "baton.fixedRayPorts" . | fromJson) "ranges" (include "baton.rayWorkerPorts" . | fromJson)) }}
{{- end -}}

{{- /* Of a worker, and of the node of Ray beside it. Takes root, role, pool. */ -}}
{{- define "baton.checkWorkerPorts" -}}
{{- $root := .root -}}
{{- $pool := .pool -}}
{{- $ports := dict -}}
{{- range $name := list "port" "linkPort" "metricsPort" }}{{ $_ := set $ports (printf "%s.%s" $.role $name) (int (index $pool $name)) }}{{ end }}
{{- $ranges := dict "transfer.nixlPorts" $root.Values.transfer.nixlPorts }}
{{- $beside := or (gt (int $pool.nodes) 1) (eq $root.Values.ray.mode "kuberay") (and (eq $root.Values.ray.mode "embedded") $root.Values.ray.joinWorkers) }}
{{- if $beside }}
{{- $ports = merge $ports (include "baton.fixedRayPorts" $root | fromJson) }}
{{- $ranges = merge $ranges (include "baton.rayWorkerPorts" $root | fromJson) }}
{{- end }}
{{- /* On the nodes of another Ray the system chooses them. */}}
{{- if ne $root.Values.ray.mode "external" }}
{{- include "baton.checkPodPorts" (dict "ports" $ports "ranges" $ranges) }}
{{- end }}
{{- end -}}

{{- /* Bytes of an amount, in Kubernetes' notation or Redis's. Takes amount, units. */ -}}
{{- define "baton.bytes" -}}
{{- $number := regexFind "^[0-9]*[.]?[0-9]+([eE][-+]?[0-9]+)?" (toString .amount) -}}
{{- mulf (float64 $number) (index .units (trimPrefix $number (toString .amount)) | default 1) -}}
{{- end -}}

{{- define "baton.quantity" -}}
{{- $units := dict "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 "m" 1e-3 -}}
{{- include "baton.bytes" (dict "amount" . "units" $units) -}}
{{- end -}}

{{- define "baton.checkSizes" -}}
{{- $limit := (.Values.redis.resources.limits | default dict).memory -}}
{{- if and .Values.redis.enabled $limit }}
{{- $redis := dict "k" 1e3 "m" 1e6 "g" 1e9 "kb" 1024.0 "mb" 1048576.0 "gb" 1073741824.0 }}
{{- $most := include "baton.bytes" (dict "amount" (lower .Values.redis.maxMemory) "units" $redis) | float64 }}
{{- if ge $most (include "baton.quantity" $limit | float64) }}
{{- fail (printf "redis.maxMemory = %s is not below redis.resources.limits.memory = %s: Kubernetes would kill Redis before it evicts anything; raise the limit, or lower maxMemory" .Values.redis.maxMemory (toString $limit)) }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "baton.checkTests" -}}
{{- $tests := .Values.tests -}}
{{- if and $tests.enabled (ge (int $tests.loadSeconds) (int $tests.timeoutSeconds)) }}
{{- fail (printf "tests.loadSeconds = %d is not below tests.timeoutSeconds = %d, the limit of its Job: raise the limit, or test for a shorter time" (int $tests.loadSeconds) (int $tests.timeoutSeconds)) }}
{{- end }}
{{- end -}}
