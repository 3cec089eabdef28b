{{- /* Ray nodes. Ray stands beside a worker, not above it: see "Ray" in the README. */ -}}

{{- define "baton.rayEnv" -}}
- {name: RAY_AUTH_MODE, value: token}
- name: RAY_AUTH_TOKEN
  valueFrom: {{- include "baton.secretKey" (dict "root" . "reference" .Values.ray.tokenSecret) | nindent 4 }}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_DISABLE_IMPORT_WARNING, value: "1"}
{{- /* While the head is replaced, nodes wait for it (its state is in Redis) and do not end: the first by seconds, the second
       by looks, two seconds apart, of a node that starts. */}}
- {name: RAY_gcs_rpc_server_reconnect_timeout_s, value: "600"}
- {name: RAY_NUM_REDIS_GET_RETRIES, value: "150"}
{{- end -}}

{{- /* Where Ray keeps its cluster's state. */ -}}
{{- define "baton.rayRedisAddress" -}}
{{- .Values.ray.gcsFaultTolerance.address | default (printf "redis://%s:%d" (include "baton.redisHost" .) (int .Values.redis.port)) -}}
{{- end -}}

{{- define "baton.rayRedisPassword" -}}
{{- $fault := .Values.ray.gcsFaultTolerance -}}
{{- if $fault.passwordSecret.name -}}
{{- include "baton.secretKey" (dict "root" . "reference" $fault.passwordSecret) -}}
{{- else if .Values.redis.enabled -}}
{{- include "baton.secretKey" (dict "root" . "reference" .Values.redis.passwordSecret) -}}
{{- end -}}
{{- end -}}

{{- define "baton.rayPortFlags" -}}
{{- $ports := .Values.ray.ports -}}
- --node-manager-port={{ $ports.nodeManager }}
- --object-manager-port={{ $ports.objectManager }}
- --runtime-env-agent-port={{ $ports.runtimeEnvAgent }}
- --dashboard-agent-grpc-port={{ $ports.dashboardAgentGrpc }}
- --dashboard-agent-listen-port={{ $ports.dashboardAgentHttp }}
- --metrics-export-port={{ $ports.metrics }}
{{- if $ports.firstWorker }}
- --min-worker-port={{ $ports.firstWorker }}
- --max-worker-port={{ $ports.lastWorker }}
{{- end }}
- --object-store-memory={{ int64 .Values.ray.objectStoreBytes }}
- --disable-usage-stats
- --temp-dir=/tmp/ray
{{- end -}}

{{- define "baton.rayContainerPorts" -}}
{{- range $name, $field := dict "ray-node" "nodeManager" "ray-objects" "objectManager" "ray-env" "runtimeEnvAgent" "ray-agent-grpc" "dashboardAgentGrpc" "ray-agent-http" "dashboardAgentHttp" "ray-metrics" "metrics" }}
{{- $port := index $.Values.ray.ports $field }}
{{- if $port }}
- {name: {{ $name }}, containerPort: {{ $port }}}
{{- end }}
{{- end }}
{{- end -}}

{{- /* A Ray node beside a worker, or the place of its further ranks. Takes root, pool, role, image, resource, gpus. */ -}}
{{- define "baton.rayNode" -}}
- name: ray
  image: {{ .image }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [ray, start, --block]
  args:
    - --address={{ include "baton.rayHead" .root }}:{{ .root.Values.ray.ports.gcs }}
    - --node-ip-address=$(POD_IP)
    - --num-cpus={{ .pool.tensorParallel }}
    - --num-gpus={{ .gpus }}
    - {{ printf "--resources={\"%s\": 1}" .resource | squote }}
    {{- include "baton.rayPortFlags" .root | nindent 4 }}
  env:
    {{- include "baton.workerEnv" . | nindent 4 }}
    {{- include "baton.rayEnv" .root | nindent 4 }}
  {{- with include "baton.rayContainerPorts" .root | trim }}
  ports: {{- . | nindent 4 }}
  {{- end }}
{{- end -}}
