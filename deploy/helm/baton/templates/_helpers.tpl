{{- define "baton.name" -}}{{ printf "%s-baton" .Release.Name | trunc 50 | trimSuffix "-" }}{{- end -}}

{{- define "baton.labels" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "baton.image" -}}{{ .root.Values.image.repository }}/{{ .role }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}{{- end -}}

{{- define "baton.redisUrl" -}}
{{- if .Values.redis.externalUrl }}{{ .Values.redis.externalUrl }}{{ else }}redis://{{ include "baton.name" . }}-redis:6379/0{{ end -}}
{{- end -}}

{{- define "baton.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "baton.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "baton.modelVolume" -}}
- name: models
{{- if .Values.model.existingClaim }}
  persistentVolumeClaim: {claimName: {{ .Values.model.existingClaim }}, readOnly: true}
{{- else }}
  emptyDir: {}
{{- end }}
{{- end -}}

{{- /* What must hold together; each message says what to change. */ -}}
{{- define "baton.validate" -}}
{{- range $role := list "prefill" "decode" -}}
{{- $pool := index $.Values $role -}}
{{- if and (gt (int $pool.gpus) 0) (ne (int $pool.gpus) (int $pool.tensorParallel)) -}}
{{- fail (printf "%s.gpus is %d and %s.tensorParallel is %d: a worker needs one GPU per rank, set them equal" $role (int $pool.gpus) $role (int $pool.tensorParallel)) -}}
{{- end -}}
{{- if ge (int $pool.drainSeconds) (int $pool.terminationGracePeriodSeconds) -}}
{{- fail (printf "%s.drainSeconds must be below %s.terminationGracePeriodSeconds, or Kubernetes kills the worker while it drains" $role $role) -}}
{{- end -}}
{{- end -}}
{{- if and (not .Values.redis.enabled) (not .Values.redis.externalUrl) -}}
{{- fail "redis.enabled is false and redis.externalUrl is empty: name a Redis or enable the chart's own" -}}
{{- end -}}
{{- if and .Values.redis.enabled .Values.redis.externalUrl -}}
{{- fail "redis.enabled is true and redis.externalUrl is set: choose one" -}}
{{- end -}}
{{- if and (eq (int .Values.prefill.replicas) 0) (eq .Values.router.localPrefill "never") -}}
{{- fail "prefill.replicas is 0 and router.localPrefill is never: nobody could prefill; allow fallback or add a replica" -}}
{{- end -}}
{{- end -}}
