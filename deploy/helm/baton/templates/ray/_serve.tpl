{{- /* The workers as a Serve application, where Ray places them (modes kuberay and external). */ -}}

{{- /* A role's description for `baton.ray_pools.serve_app:build`. Takes root, role. */ -}}
{{- define "baton.servePool" -}}
{{- $pool := index .root.Values .role -}}
{{- $config := include "baton.workerConfig" . | fromYaml -}}
{{- if eq .root.Values.ray.mode "external" }}
{{- /* Several workers may share a node there. */}}
{{- $_ := set $config "port" 0 }}
{{- $_ := set $config "link_port" 0 }}
{{- $_ := set $config "metrics_port" 0 }}
{{- end }}
{{- $described := dict "replicas" (include "baton.replicas" $pool | int) "gpus" (int $pool.gpus) "config" $config -}}
{{- if eq .root.Values.ray.mode "kuberay" }}{{- $_ := set $described "resources" (dict .role 1) }}{{- end }}
{{- toYaml $described -}}
{{- end -}}

{{- /* Takes root. */ -}}
{{- define "baton.serveConfig" -}}
proxy_location: Disabled
applications:
  - name: baton
    import_path: baton.ray_pools.serve_app:build
    route_prefix: null
    args:
      prefill: {{- include "baton.servePool" (dict "root" . "role" "prefill") | nindent 8 }}
      decode: {{- include "baton.servePool" (dict "root" . "role" "decode") | nindent 8 }}
      {{- if .Values.autoscaling.enabled }}
      autoscaling: {{- include "baton.autoscalerConfig" . | nindent 8 }}
      {{- end }}
    {{- if .Values.autoscaling.enabled }}
    autoscaling_policy:
      policy_function: baton.ray_pools.policy_adapter:PoolsPolicy
      policy_kwargs:
        config: {{- include "baton.autoscalerConfig" . | nindent 10 }}
    {{- end }}
{{- end -}}
