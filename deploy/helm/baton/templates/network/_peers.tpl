{{- /* Ends of the network's edges. */ -}}

{{- /* Pods of this release. Takes root, components. */ -}}
{{- define "baton.peer" -}}
- podSelector:
    matchLabels:
      app.kubernetes.io/name: baton
      app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
    matchExpressions:
      - {key: app.kubernetes.io/component, operator: In, values: [{{ join ", " .components }}]}
{{- end -}}

{{- define "baton.ports" -}}
{{- range . }}
- {protocol: TCP, port: {{ . }}}
{{- end }}
{{- end -}}

{{- define "baton.nixlPorts" -}}
- {protocol: TCP, port: {{ .Values.transfer.nixlPorts.first }}, endPort: {{ .Values.transfer.nixlPorts.last }}}
{{- end -}}

{{- /* Components that are nodes of the chart's Ray, as a JSON list. */ -}}
{{- define "baton.rayNodes" -}}
{{- $nodes := list -}}
{{- if include "baton.rayRuns" . }}
{{- $nodes = append $nodes "ray-head" }}
{{- range $role := list "prefill" "decode" }}
{{- $pool := index $.Values $role }}
{{- $spans := gt (int $pool.nodes) 1 }}
{{- /* A group of a LeaderWorkerSet is a Ray cluster of its own. */}}
{{- if include "baton.inGroups" (dict "root" $ "pool" $pool) }}{{ continue }}{{ end }}
{{- if or $.Values.ray.joinWorkers $spans (eq $.Values.ray.mode "kuberay") }}{{ $nodes = append $nodes $role }}{{ end }}
{{- if $spans }}{{ $nodes = append $nodes (printf "%s-ranks" $role) }}{{ end }}
{{- end }}
{{- if .Values.ray.joinWorkers }}
{{- range slice (include "baton.workerComponents" . | fromJsonArray) 2 }}{{ $nodes = append $nodes . }}{{ end }}
{{- end }}
{{- end }}
{{- toJson $nodes -}}
{{- end -}}

{{- /* Ports of one Ray node; every port where the system chooses one of them. */ -}}
{{- define "baton.rayPorts" -}}
{{- $ports := .Values.ray.ports -}}
{{- $fixed := list $ports.nodeManager $ports.objectManager $ports.runtimeEnvAgent $ports.dashboardAgentGrpc $ports.dashboardAgentHttp $ports.metrics $ports.firstWorker -}}
{{- if has 0 (list (int $ports.nodeManager) (int $ports.objectManager) (int $ports.runtimeEnvAgent) (int $ports.dashboardAgentGrpc) (int $ports.dashboardAgentHttp) (int $ports.metrics) (int $ports.firstWorker)) }}
- {protocol: TCP, port: 1, endPort: 65535}
{{- else }}
{{- include "baton.ports" (initial $fixed) }}
- {protocol: TCP, port: {{ $ports.firstWorker }}, endPort: {{ $ports.lastWorker }}}
{{- end }}
{{- end -}}

{{- /* A rule to a list of peers, or to all where the list is empty. Takes direction (from, to), peers. */ -}}
{{- define "baton.anyPeer" -}}
{{- if .peers }}
{{ .direction }}: {{- toYaml .peers | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* Port of a URL. Takes url, port (where it names none). */ -}}
{{- define "baton.urlPort" -}}
{{- $parts := splitList ":" (urlParse .url).host -}}
{{- if gt (len $parts) 1 }}{{ last $parts }}{{ else }}{{ .port }}{{ end -}}
{{- end -}}

{{- /* To Redis, wherever it is. */ -}}
{{- define "baton.redisEgress" -}}
{{- if .Values.redis.enabled }}
- ports: {{- include "baton.ports" (list .Values.redis.port) | trim | nindent 4 }}
  to: {{- include "baton.peer" (dict "root" . "components" (list "redis")) | nindent 4 }}
{{- else }}
- ports: {{- include "baton.ports" (prepend .Values.externalRedis.otherPorts .Values.externalRedis.port) | trim | nindent 4 }}
  {{- include "baton.anyPeer" (dict "direction" "to" "peers" .Values.externalRedis.peers) | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* To the prefix index's own Redis, where it has one. */ -}}
{{- define "baton.indexEgress" -}}
{{- $index := .Values.externalIndex -}}
{{- if $index.urlSecret.name }}
- ports: {{- include "baton.ports" (prepend $index.otherPorts $index.port) | trim | nindent 4 }}
  {{- include "baton.anyPeer" (dict "direction" "to" "peers" $index.peers) | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* From Ray's head to where its cluster's state is: the chart's Redis, or one of its own. */ -}}
{{- define "baton.rayRedisEgress" -}}
{{- $fault := .Values.ray.gcsFaultTolerance -}}
{{- if and $fault.enabled $fault.address }}
- ports: {{- include "baton.ports" (list (include "baton.urlPort" (dict "url" $fault.address "port" 6379))) | trim | nindent 4 }}
  {{- include "baton.anyPeer" (dict "direction" "to" "peers" $fault.peers) | nindent 2 }}
{{- else if $fault.enabled }}
{{- include "baton.redisEgress" . }}
{{- end }}
{{- end -}}

{{- /* Port of the Hub or the object store that a model is fetched from. */ -}}
{{- define "baton.modelPort" -}}
{{- $endpoint := ternary .Values.model.s3.endpoint .Values.model.huggingFace.endpoint (eq (include "baton.modelScheme" .) "s3") -}}
{{- include "baton.urlPort" (dict "url" $endpoint "port" (ternary 80 443 (hasPrefix "http://" $endpoint))) -}}
{{- end -}}

{{- /* To where models are fetched from, the API server, the trace collector, where they are used. Takes root, hub (ports), api. */ -}}
{{- define "baton.outsideEgress" -}}
{{- $values := .root.Values -}}
{{- if .hub }}
- ports: {{- include "baton.ports" .hub | trim | nindent 4 }}
  {{- include "baton.anyPeer" (dict "direction" "to" "peers" $values.networkPolicy.hub) | nindent 2 }}
{{- end }}
{{- if .api }}
- ports: {{- include "baton.ports" $values.networkPolicy.apiServerPorts | trim | nindent 4 }}
  {{- include "baton.anyPeer" (dict "direction" "to" "peers" $values.networkPolicy.apiServer) | nindent 2 }}
{{- end }}
{{- with $values.observability.otlpEndpoint }}
- ports: {{- include "baton.ports" (list (include "baton.urlPort" (dict "url" . "port" 4318))) | trim | nindent 4 }}
  to: {{- toYaml $values.networkPolicy.collector | nindent 4 }}
{{- end }}
{{- end -}}
