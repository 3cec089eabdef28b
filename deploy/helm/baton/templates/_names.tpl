{{- /* Names, labels, images, references to Secrets. */ -}}

{{- define "baton.base" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trimSuffix "-" -}}
{{- else if contains "baton" .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-baton" (.Release.Name | trunc 34 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{- /* What selectors select by; never changes in a release's life. Takes root, component. */ -}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- /* Of an object's own labels with the same name: those, since a mapping has a key once. */}}
{{- $common := deepCopy .root.Values.commonLabels }}
{{- range $name := keys (.labels | default dict) }}{{ $_ := unset $common $name }}{{ end }}
{{- with $common }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* metadata of an object. Takes root, component, name; labels, annotations (maps, optional). */ -}}
{{- define "baton.metadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace | quote }}
labels: {{- include "baton.labels" . | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (.annotations | default dict) .root.Values.commonAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "baton.registry" -}}{{ .Values.global.imageRegistry | default .Values.image.registry | trimSuffix "/" }}/{{ .Values.image.repository }}{{- end -}}

{{- /* Takes root, role, override, gpus. */ -}}
{{- define "baton.image" -}}
{{- if .override -}}
{{- .override -}}
{{- else -}}
{{- $image := .root.Values.image -}}
{{- $tag := $image.tag | default .root.Chart.AppVersion -}}
{{- if and (gt (int .gpus) 0) (not (hasSuffix $image.gpuSuffix $tag)) -}}
{{- $tag = printf "%s%s" $tag $image.gpuSuffix -}}
{{- end -}}
{{- printf "%s/%s:%s" (include "baton.registry" .root) .role $tag -}}
{{- end -}}
{{- end -}}

{{- /* Its tag is Redis's version: a new version of Baton does not restart it. */ -}}
{{- define "baton.redisImage" -}}
{{- if .Values.redis.image -}}
{{- include "baton.othersImage" (dict "root" . "image" .Values.redis.image) -}}
{{- else -}}
{{- printf "%s/redis:%s" (include "baton.registry" .) .Values.redis.tag -}}
{{- end -}}
{{- end -}}

{{- /* Copies models from object stores; its tag is rclone's version. */ -}}
{{- define "baton.rcloneImage" -}}
{{- $store := .Values.model.s3 -}}
{{- if $store.image -}}
{{- include "baton.othersImage" (dict "root" . "image" $store.image) -}}
{{- else -}}
{{- printf "%s/rclone:%s" (include "baton.registry" .) $store.tag -}}
{{- end -}}
{{- end -}}

{{- /* An image of others, from the registry of all where one is set. Takes root, image. */ -}}
{{- define "baton.othersImage" -}}
{{- $registry := .root.Values.global.imageRegistry | trimSuffix "/" -}}
{{- if $registry -}}
{{- printf "%s/%s" $registry (regexReplaceAll "^([^/]*[.:][^/]*|localhost)/" .image "") -}}
{{- else -}}
{{- .image -}}
{{- end -}}
{{- end -}}

{{- define "baton.pullSecrets" -}}
{{- with concat .Values.global.imagePullSecrets .Values.imagePullSecrets | uniq }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "baton.workerAccount" -}}
{{- ternary (printf "%s-worker" (include "baton.base" .)) (.Values.rbac.workerServiceAccount | default "default") .Values.rbac.create -}}
{{- end -}}

{{- /* Whether the workers of a role may ask the API about pods: decode workers, where that is on. Takes root, role. */ -}}
{{- define "baton.asksExits" -}}
{{- if and .root.Values.peerExits.enabled (eq .role "decode") (ne .root.Values.ray.mode "external") }}true{{ end -}}
{{- end -}}

{{- /* Whether the workers of a role ask the API at all. Takes root, role. */ -}}
{{- define "baton.asksApi" -}}
{{- if or .root.Values.topology.enabled (include "baton.asksExits" .) }}true{{ end -}}
{{- end -}}

{{- /* Takes root, role. */ -}}
{{- define "baton.roleAccount" -}}
{{- if and .root.Values.rbac.create (include "baton.asksExits" .) -}}
{{- printf "%s-decode" (include "baton.base" .root) -}}
{{- else -}}
{{- include "baton.workerAccount" .root -}}
{{- end -}}
{{- end -}}

{{- define "baton.autoscalerAccount" -}}
{{- ternary (printf "%s-autoscaler" (include "baton.base" .)) (.Values.rbac.autoscalerServiceAccount | default "default") .Values.rbac.create -}}
{{- end -}}

{{- /* secretKeyRef: an existing Secret {name, key}, or the chart's own. Takes root, reference. */ -}}
{{- define "baton.secretKey" -}}
secretKeyRef: {name: {{ .reference.name | default (include "baton.base" .root) }}, key: {{ .reference.key }}}
{{- end -}}

{{- define "baton.redisHost" -}}{{ include "baton.base" . }}-redis{{- end -}}
{{- /* Address of the chart's Redis. The deployment of the Serve application passes it to Ray's nodes too, and an external
       Ray may be in another namespace, where the short name does not resolve. */ -}}
{{- define "baton.redisAddress" -}}
{{- include "baton.redisHost" . }}{{ if eq .Values.ray.mode "external" }}.{{ .Release.Namespace }}.svc{{ end }}
{{- end -}}
{{- /* Users of the chart's Redis, by components; separated by spaces. All always, because a change of its pod restarts Redis. */ -}}
{{- define "baton.redisUsers" -}}router worker autoscaler{{- end -}}
{{- /* Where Redis's own pod has a user's password. Takes the user. */ -}}
{{- define "baton.redisPasswordName" -}}REDIS_{{ upper . }}_PASSWORD{{- end -}}
{{- define "baton.redisScheme" -}}{{ ternary "rediss" "redis" .Values.tls.enabled }}{{- end -}}
{{- define "baton.rayHead" -}}{{ include "baton.base" . }}-ray-head{{- end -}}

{{- /* "pvc", "hf", "s3" or "file". */ -}}
{{- define "baton.modelScheme" -}}{{ index (splitList "://" .Values.model.source) 0 }}{{- end -}}

{{- /* Where every pod finds the model directory. */ -}}
{{- define "baton.modelPath" -}}
{{- $rest := trimPrefix (printf "%s://" (include "baton.modelScheme" .)) .Values.model.source -}}
{{- if eq (include "baton.modelScheme" .) "pvc" -}}
{{- $parts := splitn "/" 2 $rest -}}
{{- printf "/%s/%s" (include "baton.modelsVolume" .) ($parts._1 | default "") | trimSuffix "/" -}}
{{- else if eq (include "baton.modelScheme" .) "hf" -}}
{{- /* In a claim pods of two releases meet: a file that one replaces while another loads it would give that one weights of both. */ -}}
{{- $parts := append (splitList "@" $rest) "main" -}}
{{- $apart := and .Values.model.huggingFace.cacheClaim (ne (index $parts 1) "main") -}}
{{- $revision := ternary (printf "--%s" (index $parts 1)) "" (not (empty $apart)) -}}
{{- printf "/%s/%s%s" (include "baton.modelsVolume" .) (first $parts | replace "/" "--") $revision -}}
{{- else if eq (include "baton.modelScheme" .) "s3" -}}
{{- printf "/%s/%s" (include "baton.modelsVolume" .) (base (trimSuffix "/" $rest)) -}}
{{- else -}}
{{- $rest -}}
{{- end -}}
{{- end -}}

{{- define "baton.servedName" -}}
{{- if .Values.model.servedName -}}
{{- .Values.model.servedName -}}
{{- else if eq (include "baton.modelScheme" .) "hf" -}}
{{- index (splitList "@" (trimPrefix "hf://" .Values.model.source)) 0 -}}
{{- else -}}
{{- base (include "baton.modelPath" .) -}}
{{- end -}}
{{- end -}}

{{- /* Directory of adapters in a worker's pod; empty: there are none. Their volume is beside the model's. */ -}}
{{- define "baton.adaptersPath" -}}
{{- $source := .Values.model.adapters.source -}}
{{- if hasPrefix "pvc://" $source -}}
{{- $parts := splitn "/" 2 (trimPrefix "pvc://" $source) -}}
{{- printf "/%s/%s" (include "baton.adaptersVolume" .) ($parts._1 | default "") | trimSuffix "/" -}}
{{- else -}}
{{- trimPrefix "file://" $source | trimSuffix "/" -}}
{{- end -}}
{{- end -}}
{{- define "baton.adaptersVolume" -}}adapters{{ with .key }}-{{ . }}{{ end }}{{- end -}}

{{- /* "yes" where clients must show a key. */ -}}
{{- define "baton.apiKeysOn" -}}{{ if or .Values.apiKeys.existingSecret .Values.apiKeys.entries }}yes{{ end }}{{- end -}}
{{- define "baton.apiKeysSecret" -}}{{ .Values.apiKeys.existingSecret | default (printf "%s-api-keys" (include "baton.base" .)) }}{{- end -}}

{{- /* Name of the Secret with a role's certificate. Takes root, role (router, worker). */ -}}
{{- define "baton.tlsSecret" -}}
{{- if eq .root.Values.tls.source "secrets" -}}
{{- index .root.Values.tls.secrets .role -}}
{{- else -}}
{{- printf "%s-%s-tls" (include "baton.base" .root) .role -}}
{{- end -}}
{{- end -}}

{{- /* The only transport that KV may take; empty: workers choose. */ -}}
{{- define "baton.onlyTransport" -}}
{{- .Values.transfer.requireTransport | replace "rdma" "nixl" | default (.Values.transfer.transport | replace "auto" "") -}}
{{- end -}}

{{- /* The workers' fixed number. Takes the pool. */ -}}
{{- define "baton.replicas" -}}{{ if kindIs "invalid" .replicas }}1{{ else }}{{ int .replicas }}{{ end }}{{- end -}}
{{- define "baton.routerReplicas" -}}{{ if kindIs "invalid" .Values.router.replicas }}2{{ else }}{{ int .Values.router.replicas }}{{ end }}{{- end -}}

{{- /* The number of replicas to render where an autoscaler sets it: none, so that an upgrade leaves it as it is. Helm resets a
       number that the revision before rendered and this one does not, to 1: so after a fixed number the one in the cluster is
       rendered, from then on. `baton/replicas: scaled` marks objects that have never had one. Takes root, kind, name. */ -}}
{{- define "baton.scaledReplicas" -}}
{{- $live := lookup "apps/v1" .kind .root.Release.Namespace .name -}}
{{- if ne (dig "metadata" "annotations" "baton/replicas" "" $live) "scaled" -}}
{{- with dig "spec" "replicas" 0 $live | int }}{{ . }}{{ end -}}
{{- end -}}
{{- end -}}

{{- /* The mark of `baton.scaledReplicas`, a map in JSON. Takes scaled, and the number that is rendered. */ -}}
{{- define "baton.scaledMark" -}}
{{- $mark := dict -}}
{{- if and .scaled (not .replicas) }}{{ $_ := set $mark "baton/replicas" "scaled" }}{{ end -}}
{{- toJson $mark -}}
{{- end -}}
