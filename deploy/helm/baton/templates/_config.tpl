{{- /* The configuration files of the processes. Secrets come from the environment, never from here. */ -}}

{{- define "baton.namespaceKey" -}}{{ printf "%s-%s" .Release.Namespace .Release.Name }}{{- end -}}

{{- /* Certificates of a role as fields of its configuration. Takes root. */ -}}
{{- define "baton.tlsFields" -}}
{{- if .Values.tls.enabled }}
tls_cert: /etc/baton/tls/tls.crt
tls_key: /etc/baton/tls/tls.key
tls_ca: /etc/baton/tls/ca.crt
{{- end }}
{{- end -}}

{{- define "baton.routerConfig" -}}
{{- $router := .Values.router -}}
{{- $config := dict
    "http_port" (int $router.httpPort) "grpc_port" (int $router.grpcPort) "metrics_port" (int $router.metricsPort)
    "namespace" (include "baton.namespaceKey" .) "model" (include "baton.modelPath" .)
    "served_model_name" (include "baton.servedName" .) "max_model_len" (int .Values.model.maxModelLen)
    "page_size" (int .Values.model.pageSize) "local_prefill" $router.localPrefill
    "share_prefixes_across_tenants" $router.sharePrefixesAcrossTenants "drain_seconds" (int $router.drainSeconds)
    "drain_delay_seconds" (int $router.drainDelaySeconds)
    "max_connection_seconds" (int $router.maxConnectionSeconds) -}}
{{- /* Only where it differs from the default, for containers of an earlier image: see the worker's file. */}}
{{- if ne (int $router.processes) 1 }}{{- $_ := set $config "processes" (int $router.processes) }}{{- end }}
{{- if $router.listenAddress }}{{- $_ := set $config "host" $router.listenAddress }}{{- end }}
{{- if include "baton.apiKeysOn" . }}{{- $_ := set $config "api_keys_file" (printf "/etc/baton/keys/%s" .Values.apiKeys.key) }}{{- end }}
{{- if .Values.models }}{{- $_ := set $config "models" (include "baton.routerModels" . | fromJsonArray) }}{{- end }}
{{- $config = merge $config (include "baton.tlsFields" . | fromYaml) -}}
{{- if .Values.tls.enabled }}
{{- if .Values.tls.publicSecret }}
{{- $_ := set $config "public_tls_cert" "/etc/baton/public-tls/tls.crt" }}
{{- $_ := set $config "public_tls_key" "/etc/baton/public-tls/tls.key" }}
{{- end }}
{{- if .Values.tls.clientCaSecret }}{{- $_ := set $config "tls_client_ca" "/etc/baton/client-ca/ca.crt" }}{{- end }}
{{- end }}
{{- toYaml (mergeOverwrite $config $router.config) -}}
{{- end -}}

{{- /* Without prefill workers a request that goes back comes here again. Takes root. */ -}}
{{- define "baton.recomputeLimit" -}}
{{- $limit := .Values.decode.recomputeLimitTokens -}}
{{- $prefill := .Values.prefill.replicas -}}
{{- if not (kindIs "invalid" $limit) }}{{ int $limit }}
{{- else if kindIs "invalid" $prefill }}256
{{- else }}{{ ternary 0 256 (eq (int $prefill) 0) }}{{ end -}}
{{- end -}}

{{- /* Takes root, role. */ -}}
{{- define "baton.workerConfig" -}}
{{- $root := .root -}}
{{- $pool := index $root.Values .role -}}
{{- $model := $root.Values.model -}}
{{- $transfer := $root.Values.transfer -}}
{{- $engine := dict
    "model" (include "baton.modelPath" $root) "dtype" ($pool.dtype | default $model.dtype)
    "device" (ternary "cuda" "cpu" (gt (int $pool.gpus) 0))
    "max_model_len" (int $model.maxModelLen) "page_size" (int $model.pageSize)
    "kv_memory_bytes" (int64 $pool.kvMemoryBytes) "max_batch_tokens" (int $pool.maxBatchTokens)
    "max_batch_requests" (int $pool.maxBatchRequests) "tensor_parallel" (int $pool.tensorParallel)
    "threads" (int $pool.threads) -}}
{{- /* Newer settings only where they differ from the process's default: a container of an earlier image that restarts during
       a rolling update reads this file, and refuses settings that it does not have. */}}
{{- if ne $model.quantization "auto" }}{{- $_ := set $engine "quantization" $model.quantization }}{{- end }}
{{- if ne $model.kvDtype "auto" }}{{- $_ := set $engine "kv_dtype" $model.kvDtype }}{{- end }}
{{- $adapters := include "baton.adaptersPath" $root }}
{{- if $model.adapters.slots }}
{{- $_ := set $engine "max_loras" (int $model.adapters.slots) }}
{{- $_ := set $engine "max_lora_rank" (int $model.adapters.maxRank) }}
{{- $load := list }}
{{- range $name, $directory := $model.adapters.load }}{{ $load = append $load (printf "%s=%s/%s" $name $adapters $directory) }}{{ end }}
{{- with $load }}{{- $_ := set $engine "lora" . }}{{- end }}
{{- end }}
{{- if ne (float64 $pool.memoryUtilization) 0.9 }}{{- $_ := set $engine "memory_utilization" (float64 $pool.memoryUtilization) }}{{- end }}
{{- if gt (int $pool.nodes) 1 }}{{- $_ := set $engine "nodes" (int $pool.nodes) }}{{- end }}
{{- if $pool.expertParallel }}{{- $_ := set $engine "expert_parallel" true }}{{- end }}
{{- if and (eq .role "decode") (ne $root.Values.decode.speculation "none") }}{{- $_ := set $engine "speculation" $root.Values.decode.speculation }}{{- end }}
{{- if and (eq .role "decode") $root.Values.decode.draftModel }}{{- $_ := set $engine "draft_model" $root.Values.decode.draftModel }}{{- end }}
{{- $recompute := int (include "baton.recomputeLimit" $root) }}
{{- if and (eq .role "decode") $recompute }}{{- $_ := set $engine "recompute_limit_tokens" $recompute }}{{- end }}
{{- $config := dict
    "role" .role "port" (int $pool.port) "link_port" (int $pool.linkPort) "metrics_port" (int $pool.metricsPort)
    "namespace" (include "baton.namespaceKey" $root) "drain_seconds" (int $pool.drainSeconds)
    "step_stall_seconds" (int $pool.livenessSeconds) "load_seconds" (int $model.loadSeconds) "engine" $engine
    "transfer" (dict
      "transport" $transfer.transport "require_transport" $transfer.requireTransport
      "ring_bytes" (int64 $transfer.ringBytes) "ring_max_bytes" (int64 $transfer.ringMaxBytes)
      "port_range" (printf "%d-%d" (int $transfer.nixlPorts.first) (int $transfer.nixlPorts.last))) -}}
{{- with $root.key }}{{- $_ := set $config "served_model_name" . }}{{- end }}
{{- with $adapters }}{{- $_ := set $config "lora_dir" . }}{{- end }}
{{- if $transfer.slotBytes }}{{- $_ := set $config.transfer "slot_bytes" (int64 $transfer.slotBytes) }}{{- end }}
{{- if include "baton.asksExits" . }}{{- $_ := set $config "peer_exits" "kubernetes" }}{{- end }}
{{- if and (gt (int $pool.nodes) 1) (not (include "baton.inGroups" (dict "root" $root "pool" $pool))) }}{{- $_ := set $config "ray_address" (printf "%s:%d" (include "baton.rayHead" $root) (int $root.Values.ray.ports.gcs)) }}{{- end }}
{{- $config = merge $config (include "baton.tlsFields" $root | fromYaml) -}}
{{- toYaml (mergeOverwrite $config $pool.config) -}}
{{- end -}}

{{- /* How a component reaches Redis, as a user of its own. Takes root, redisUser. */ -}}
{{- define "baton.redisEnv" -}}
{{- $values := .root.Values -}}
{{- if $values.redis.enabled }}
- name: REDIS_PASSWORD
  valueFrom: {{- include "baton.secretKey" (dict "root" .root "reference" (index $values.redis.passwordSecrets .redisUser)) | nindent 4 }}
- name: BATON_REDIS_URL
  value: {{ include "baton.redisScheme" .root }}://{{ .redisUser }}:$(REDIS_PASSWORD)@{{ include "baton.redisAddress" .root }}:{{ $values.redis.port }}/0{{ if $values.tls.enabled }}?ssl_ca_certs=/etc/baton/tls/ca.crt{{ end }}
{{- else }}
{{- $own := index $values.externalRedis .redisUser }}
{{- $has := or $own.url $own.urlSecret.name }}
{{- $given := ternary $own $values.externalRedis (not (empty $has)) }}
- name: BATON_REDIS_URL
{{- if $given.urlSecret.name }}
  valueFrom: {{- include "baton.secretKey" (dict "root" .root "reference" $given.urlSecret) | nindent 4 }}
{{- else }}
  valueFrom:
    secretKeyRef: {name: {{ include "baton.base" .root }}-external-redis, key: {{ if $has }}{{ .redisUser }}-{{ end }}url}
{{- end }}
{{- end }}
{{- end -}}

{{- /* The URL that values give for an external Redis: a user's own, or where redisUser is empty that of all. Takes root, redisUser. */ -}}
{{- define "baton.externalUrl" -}}
{{- $external := .root.Values.externalRedis -}}
{{- $url := $external.url -}}
{{- if .redisUser }}{{ $url = (index $external .redisUser).url }}{{ end -}}
{{- if and $url $external.tlsSecret -}}
{{- $url = printf "%s%sssl_ca_certs=/etc/baton/redis-tls/ca.crt" $url (ternary "&" "?" (contains "?" $url)) -}}
{{- if $external.clientCertificate -}}
{{- $url = printf "%s&ssl_certfile=/etc/baton/redis-tls/tls.crt&ssl_keyfile=/etc/baton/redis-tls/tls.key" $url -}}
{{- end -}}
{{- end -}}
{{- $url -}}
{{- end -}}

{{- /* What must roll a component's pods beside its file: a URL that a Secret of the chart's holds, which processes read when they
       start. Else some would stay at the Redis of before, and place requests apart from the others. Its hash is in an annotation,
       at which a guess of a password could be tested: of passwords only the number of changes counts. Takes root, redisUser. */ -}}
{{- define "baton.urlChecksum" -}}
{{- $own := include "baton.externalUrl" . -}}
{{- $user := ternary .redisUser "" (not (empty $own)) -}}
{{- $url := $own | default (include "baton.externalUrl" (dict "root" .root "redisUser" "")) -}}
{{- if $url -}}
{{- $open := regexReplaceAll "([?&][^=&]*password=)[^&]*" $url "${1}" -}}
{{- $open = regexReplaceAll "^([a-z+]+://[^:@]*):.*@" $open "${1}@" -}}
{{- printf "%s %s %s" (include "baton.urlKey" $user) (include "baton.urlRevision" (dict "root" .root "redisUser" $user)) $open -}}
{{- end -}}
{{- end -}}

{{- /* A URL's key in the chart's Secret. Takes redisUser. */ -}}
{{- define "baton.urlKey" -}}{{ if . }}{{ . }}-{{ end }}url{{- end -}}

{{- /* How often the URL has changed since the install, by that Secret in the cluster; 0 where Helm sees no cluster. Takes root,
       redisUser. */ -}}
{{- define "baton.urlRevision" -}}
{{- $key := include "baton.urlKey" .redisUser -}}
{{- $old := lookup "v1" "Secret" .root.Release.Namespace (printf "%s-external-redis" (include "baton.base" .root)) -}}
{{- $revision := dig "metadata" "annotations" (printf "baton/%s-revision" $key) "0" $old | int -}}
{{- $url := dig "data" $key "" $old | b64dec -}}
{{- if and $url (ne $url (include "baton.externalUrl" .)) }}{{ $revision = add1 $revision }}{{ end -}}
{{- $revision -}}
{{- end -}}

{{- /* A Redis of the prefix index's own. Takes root, redisUser. */ -}}
{{- define "baton.indexEnv" -}}
{{- $secret := .root.Values.externalIndex.urlSecret -}}
{{- if and $secret.name (ne .redisUser "autoscaler") }}
- name: BATON_INDEX_URL
  valueFrom:
    secretKeyRef: {name: {{ $secret.name }}, key: {{ index $secret (printf "%sKey" .redisUser) }}}
{{- end }}
{{- end -}}

{{- define "baton.podEnv" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end -}}

{{- /* Environment of every process of ours. Takes root, redisUser. */ -}}
{{- define "baton.commonEnv" -}}
{{ include "baton.podEnv" .root }}
{{ include "baton.redisEnv" . | trim }}
{{- with include "baton.indexEnv" . | trim }}
{{ . }}
{{- end }}
{{- /* The autoscaler hashes no blocks and reads no tickets. */}}
{{- if ne .redisUser "autoscaler" }}
- name: BATON_SECRET
  valueFrom: {{- include "baton.secretKey" (dict "root" .root "reference" .root.Values.deploymentSecret) | nindent 4 }}
{{- end }}
{{- with .root.Values.observability.otlpEndpoint }}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ . | quote }}}
- {name: OTEL_RESOURCE_ATTRIBUTES, value: "k8s.pod.name=$(POD_NAME),k8s.namespace.name=$(POD_NAMESPACE)"}
{{- end }}
{{ include "baton.scratchEnv" .root }}
{{- end -}}

{{- /* The root file system is read-only: everything that writes, writes to /tmp. */ -}}
{{- define "baton.scratchEnv" -}}
- {name: HOME, value: /tmp}
- {name: XDG_CACHE_HOME, value: /tmp/cache}
- {name: NUMBA_CACHE_DIR, value: /tmp/cache/numba}
- {name: TRITON_CACHE_DIR, value: /tmp/cache/triton}
{{- end -}}

{{- /* Environment of a worker. Takes root, pool. */ -}}
{{- define "baton.workerEnv" -}}
{{ include "baton.commonEnv" (dict "root" .root "redisUser" "worker") }}
- {name: BATON_HOST, value: $(POD_IP)}
{{- if .root.Values.topology.enabled }}
- name: NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
{{- end }}
{{- if .root.Values.peerExits.enabled }}
- name: POD_UID
  valueFrom: {fieldRef: {fieldPath: metadata.uid}}
- name: POD_NODE
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
- {name: POD_CONTAINER, value: worker}
{{- end }}
- {name: BATON_CONFIG, value: /etc/baton/config/worker.yaml}
- {name: BATON_READY_FILE, value: /tmp/baton-ready.json}
{{- if include "baton.inGroups" . }}
- {name: BATON_RAY_ADDRESS, value: "$(POD_IP):{{ .root.Values.ray.ports.gcs }}"}
{{- end }}
{{ include "baton.rankEnv" . }}
{{- end -}}

{{- /* Environment of whatever computes. Takes pool. */ -}}
{{- define "baton.rankEnv" -}}
- {name: OMP_NUM_THREADS, value: {{ .pool.threads | quote }}}
- {name: OMP_WAIT_POLICY, value: PASSIVE}
- {name: TOKENIZERS_PARALLELISM, value: "false"}
{{- range $name, $value := .pool.ucx }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end -}}

{{- /* Takes root, role. */ -}}
{{- define "baton.poolLimits" -}}
{{- $bounds := index .root.Values.autoscaling .role -}}
{{- toYaml (dict
    "min_replicas" (int $bounds.minReplicas) "max_replicas" (int $bounds.maxReplicas)
    "gpus_per_replica" (max 1 (int (index .root.Values .role).gpus))
    "startup_seconds" (int ($bounds.startupSeconds | default .root.Values.model.loadSeconds))) -}}
{{- end -}}

{{- /* The policy of both pools: of `baton autoscale`, or inside Ray Serve. */ -}}
{{- define "baton.autoscalerConfig" -}}
{{- $scaling := .Values.autoscaling -}}
{{- $config := dict
    "metrics_port" (int $scaling.metricsPort) "gpu_budget" (int $scaling.gpuBudget)
    "ttft_objective_seconds" $scaling.ttftSeconds "itl_objective_seconds" $scaling.itlSeconds
    "scale_to_zero" $scaling.scaleToZero -}}
{{- if include "baton.workersAreSets" . }}
{{- $base := include "baton.base" . }}
{{- $_ := set $config "namespace" (include "baton.namespaceKey" .) }}
{{- $_ := set $config "kubernetes_namespace" .Release.Namespace }}
{{- $_ := set $config "stateful_sets" (dict "prefill" (printf "%s-prefill" $base) "decode" (printf "%s-decode" $base)) }}
{{- else }}
{{- $_ := set $config "metrics_host" "0.0.0.0" }}
{{- end }}
{{- range $role := list "prefill" "decode" }}
{{- $_ := set $config $role (include "baton.poolLimits" (dict "root" $ "role" $role) | fromYaml) }}
{{- end }}
{{- $all := dict }}
{{- include "baton.modelRoots" (dict "root" . "into" $all) }}
{{- $further := list }}
{{- range $one := rest $all.roots }}
{{- $pools := dict "name" $one.key "ttft_objective_seconds" $one.Values.autoscaling.ttftSeconds "itl_objective_seconds" $one.Values.autoscaling.itlSeconds }}
{{- $sets := dict }}
{{- range $role := list "prefill" "decode" }}
{{- $_ := set $sets $role (printf "%s-%s" (include "baton.base" $one) (include "baton.component" (dict "root" $one "role" $role))) }}
{{- $_ := set $pools $role (include "baton.poolLimits" (dict "root" $one "role" $role) | fromYaml) }}
{{- end }}
{{- $further = append $further (set $pools "stateful_sets" $sets) }}
{{- end }}
{{- if $further }}
{{- $_ := set $config "served_model_name" (include "baton.servedName" .) }}
{{- $_ := set $config "models" $further }}
{{- end }}
{{- toYaml (mergeOverwrite $config $scaling.config) -}}
{{- end -}}
