{{- /* The free-form `config` maps: settings by their own names, of which those that are values of the chart, or secrets, are
       refused. They would be merged over what the chart writes, behind the back of its checks, ports and policies. */ -}}

{{- define "baton.checkConfigs" -}}
{{- $tls := dict "tls_cert" "tls" "tls_key" "tls" "tls_ca" "tls" -}}
{{- $names := dict "namespace" "the release's name and namespace" "otlp_endpoint" "observability.otlpEndpoint" -}}
{{- $router := dict
    "host" "router.listenAddress" "http_port" "router.httpPort" "grpc_port" "router.grpcPort" "metrics_port" "router.metricsPort"
    "processes" "router.processes" "router_id" "nothing: it is the pod's name" "model" "model.source" "served_model_name" "model.servedName" "models" "models"
    "max_model_len" "model.maxModelLen" "page_size" "model.pageSize" "local_prefill" "router.localPrefill"
    "share_prefixes_across_tenants" "router.sharePrefixesAcrossTenants" "drain_seconds" "router.drainSeconds"
    "drain_delay_seconds" "router.drainDelaySeconds" "max_connection_seconds" "router.maxConnectionSeconds"
    "api_keys_file" "apiKeys" "public_tls_cert" "tls.publicSecret" "public_tls_key" "tls.publicSecret" "tls_client_ca" "tls.clientCaSecret" -}}
{{- include "baton.checkConfig" (dict "where" "router" "config" .Values.router.config "taken" (merge $router $tls $names)) }}
{{- range $role := list "prefill" "decode" }}
{{- $worker := dict
    "role" "the pool's own name" "port" (printf "%s.port" $role) "link_port" (printf "%s.linkPort" $role) "metrics_port" (printf "%s.metricsPort" $role)
    "drain_seconds" (printf "%s.drainSeconds" $role) "step_stall_seconds" (printf "%s.livenessSeconds" $role) "ray_address" "ray"
    "load_seconds" "model.loadSeconds" "served_model_name" "models"
    "engine.model" "model.source" "engine.dtype" (printf "%s.dtype" $role)
    "engine.quantization" "model.quantization" "engine.kv_dtype" "model.kvDtype" "engine.device" (printf "%s.gpus" $role)
    "engine.max_model_len" "model.maxModelLen" "engine.page_size" "model.pageSize"
    "lora_dir" "model.adapters.source" "engine.lora" "model.adapters.load" "engine.max_loras" "model.adapters.slots"
    "engine.max_lora_rank" "model.adapters.maxRank"
    "engine.kv_memory_bytes" (printf "%s.kvMemoryBytes" $role) "engine.memory_utilization" (printf "%s.memoryUtilization" $role)
    "engine.max_batch_tokens" (printf "%s.maxBatchTokens" $role)
    "engine.max_batch_requests" (printf "%s.maxBatchRequests" $role) "engine.tensor_parallel" (printf "%s.tensorParallel" $role)
    "engine.expert_parallel" (printf "%s.expertParallel" $role)
    "engine.threads" (printf "%s.threads" $role) "engine.nodes" (printf "%s.nodes" $role)
    "transfer.transport" "transfer.transport" "transfer.require_transport" "transfer.requireTransport"
    "transfer.ring_bytes" "transfer.ringBytes" "transfer.ring_max_bytes" "transfer.ringMaxBytes"
    "transfer.slot_bytes" "transfer.slotBytes" "transfer.port_range" "transfer.nixlPorts" }}
{{- if eq $role "decode" }}
{{- $_ := set $worker "engine.recompute_limit_tokens" "decode.recomputeLimitTokens" }}
{{- if and (eq $.Values.decode.speculation "none") (not $.Values.decode.draftModel) }}{{- $_ := set $worker "engine.speculative_tokens" "decode.speculation ngram or decode.draftModel beside it" }}{{- end }}
{{- if not $.Values.decode.draftModel }}{{- $_ := set $worker "engine.draft_kv_memory_bytes" "decode.draftModel beside it" }}{{- end }}
{{- else }}
{{- $_ := set $worker "engine.speculative_tokens" "decode.config.engine.speculative_tokens" }}
{{- $_ := set $worker "engine.draft_kv_memory_bytes" "decode.config.engine.draft_kv_memory_bytes" }}
{{- end }}
{{- $_ := set $worker "engine.speculation" "decode.speculation" }}
{{- $_ := set $worker "engine.draft_model" "decode.draftModel" }}
{{- /* The chart sets no addresses on nodes that are not its own. */}}
{{- if ne $.Values.ray.mode "external" }}{{- $_ := set $worker "host" "nothing: it is the pod's address" }}{{- end }}
{{- include "baton.checkConfig" (dict "where" $role "config" (index $.Values $role).config "taken" (merge $worker $tls $names)) }}
{{- end }}
{{- $scaling := dict
    "metrics_port" "autoscaling.metricsPort" "metrics_host" "nothing: it is the pod's address" "host" "nothing: it is the pod's address"
    "gpu_budget" "autoscaling.gpuBudget" "ttft_objective_seconds" "autoscaling.ttftSeconds" "itl_objective_seconds" "autoscaling.itlSeconds"
    "scale_to_zero" "autoscaling.scaleToZero" "kubernetes_namespace" "the release's namespace" "stateful_sets" "the release's name"
    "models" "models" "served_model_name" "model.servedName" -}}
{{- range $role := list "prefill" "decode" }}
{{- $_ := set $scaling (printf "%s.min_replicas" $role) (printf "autoscaling.%s.minReplicas" $role) }}
{{- $_ := set $scaling (printf "%s.max_replicas" $role) (printf "autoscaling.%s.maxReplicas" $role) }}
{{- $_ := set $scaling (printf "%s.startup_seconds" $role) (printf "autoscaling.%s.startupSeconds" $role) }}
{{- $_ := set $scaling (printf "%s.gpus_per_replica" $role) (printf "%s.gpus" $role) }}
{{- end }}
{{- include "baton.checkConfig" (dict "where" "autoscaling" "config" .Values.autoscaling.config "taken" (merge $scaling $names)) }}
{{- end -}}

{{- /* Takes where (what the map belongs to), config, taken: setting → what to use in its place. */ -}}
{{- define "baton.checkConfig" -}}
{{- range $field, $use := dict "secret" "deploymentSecret" "redis_url" "externalRedis.urlSecret" "redis_password" "externalRedis.urlSecret" "index_url" "externalIndex.urlSecret" "index_password" "externalIndex.urlSecret" }}
{{- if hasKey $.config $field }}
{{- fail (printf "%s.config.%s would be readable in a ConfigMap: use %s" $.where $field $use) }}
{{- end }}
{{- end }}
{{- range $setting, $use := .taken }}
{{- $parts := splitList "." $setting }}
{{- $holder := $.config }}
{{- if gt (len $parts) 1 }}{{- $holder = index $.config (first $parts) | default dict }}{{- end }}
{{- if not (kindIs "map" $holder) }}
{{- fail (printf "%s.config.%s is a mapping of settings, not one value: write its settings below it" $.where (first $parts)) }}
{{- end }}
{{- if hasKey $holder (last $parts) }}
{{- fail (printf "%s.config.%s would go behind the chart's own settings, which its checks, ports and policies follow: use %s" $.where $setting $use) }}
{{- end }}
{{- end }}
{{- end -}}
